"""What the FP8 product tells cuBLASLt, seen by a library that only writes down what it is told."""

import ctypes

import pytest
import torch

from gpt2_fp8.kernels import cublaslt, gemm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STREAM, HANDLE, CPU = 77, 7, -1  # a CPU tensor's get_device() is -1
M, N, K = 32, 48, 64


class FakeLibrary:
    """Descriptors and layouts are numbers; `products` are cublasLtMatmul's arguments, with its descriptor's values."""

    def __init__(self):
        self.made, self.attributes, self.preference = {}, {}, {}
        self.searches, self.products, self.refuse, self.found = [], [], {}, 2

    def _make(self, where, *arguments):
        where._obj.value = 1000 + len(self.made)
        self.made[where._obj.value] = arguments
        return 0

    cublasLtMatrixLayoutCreate = cublasLtMatmulDescCreate = cublasLtMatmulPreferenceCreate = _make  # noqa: N815

    def cublasLtMatmulDescSetAttribute(self, descriptor, number, where, size):  # noqa: N802
        value = where._obj
        assert size == ctypes.sizeof(value)
        self.attributes.setdefault(descriptor.value, {})[number] = (value.value or 0, size)
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, _, number, where, size):  # noqa: N802
        self.preference[number] = (where._obj.value, size)
        return 0

    def cublasLtMatmulPreferenceDestroy(self, _):  # noqa: N802
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, descriptor, a, b, c, d, _, count, results, found):  # noqa: N802
        self.searches.append((handle, descriptor.value, a.value, b.value, c.value, d.value, count))
        self.seen_by_search = dict(self.attributes[descriptor.value])
        found._obj.value = self.found
        for index in range(self.found):
            results[index].algorithm.data[0] = 500 + index
        return self.refuse.get("search", 0)

    def cublasLtMatmul(self, handle, descriptor, *arguments):  # noqa: N802
        self.products.append((handle, dict(self.attributes[descriptor.value]), *map(plain, arguments)))
        return self.refuse.get("product", 0)

    def cublasLtGetStatusName(self, status):  # noqa: N802
        return {13: b"CUBLAS_STATUS_EXECUTION_FAILED", 15: b"CUBLAS_STATUS_NOT_SUPPORTED"}[status]


def plain(argument):
    argument = getattr(argument, "_obj", argument)
    return argument.data[0] if isinstance(argument, cublaslt.Algorithm) else getattr(argument, "value", argument)


@pytest.fixture
def library(monkeypatch):
    fake = FakeLibrary()
    monkeypatch.setattr(cublaslt, "library", lambda: fake)
    monkeypatch.setattr(cublaslt, "handle", lambda device: HANDLE)
    monkeypatch.setattr(gemm, "current_raw_stream", lambda device: STREAM)
    monkeypatch.setattr(gemm, "_plans", {})
    monkeypatch.setattr(gemm, "_workspaces", {(CPU, STREAM): torch.empty(16)})
    return fake


def aligned(shape, dtype, offset=0):
    """A tensor at a multiple of 256 bytes, plus `offset` bytes."""
    count = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.zeros(count + 512, dtype=torch.uint8)
    start = -memory.data_ptr() % 256 + offset
    return memory[start : start + count].view(dtype).view(shape)


def operands(m=M, n=N, k=K, a=E4M3, b=E4M3, out=torch.bfloat16):
    scales = [torch.tensor([0.5]), torch.tensor([0.25])]
    return [aligned((m, k), a), aligned((n, k), b), aligned((m, n), out), *scales]


def test_structures_have_the_headers_sizes():
    offsets = [getattr(cublaslt.Result, name).offset for name in ("workspace_bytes", "state", "waves", "reserved")]
    assert (ctypes.sizeof(cublaslt.Algorithm), ctypes.sizeof(cublaslt.Result)) == (64, 96)
    assert offsets == [64, 72, 76, 80]


def test_row_major_becomes_column_major(library):
    a, b, out, a_scale, b_scale = given = operands(a=E5M2)
    assert gemm.matmul(*given) is out
    ((handle, attributes, alpha, *places, algorithm, at, size, stream),) = library.products
    at_a, of_a, at_b, of_b, beta, at_c, of_c, at_d, of_d = places
    assert (handle, alpha, beta, stream) == (HANDLE, 1.0, 0.0, STREAM)
    assert (at_a, at_b, at_c, at_d) == (b.data_ptr(), a.data_ptr(), out.data_ptr(), out.data_ptr())
    # type (28: E4M3, 29: E5M2, 14: bf16), rows, columns, leading dimension
    assert [library.made[of] for of in (of_a, of_b, of_c, of_d)] == [
        (28, K, N, K), (29, K, M, K), (14, N, M, N), (14, N, M, N),
    ]  # fmt: skip
    assert (algorithm, size) == (500, 32 * 2**20)
    assert at == gemm._workspaces[CPU, STREAM].data_ptr()
    # number: (value, bytes); transposed, not transposed, no fast accumulation, the scales
    assert attributes == {
        3: (1, 4), 4: (0, 4), 25: (0, 1), 17: (b_scale.data_ptr(), 8), 18: (a_scale.data_ptr(), 8),
    }  # fmt: skip
    assert library.preference == {1: (32 * 2**20, 8), **dict.fromkeys((5, 6, 7, 8), (256, 4))}
    (search,) = library.searches
    assert search == (HANDLE, search[1], of_a, of_b, of_c, of_d, 16)
    assert library.made[search[1]] == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
    assert library.seen_by_search == attributes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_plan_serves_other_tensors_and_bias_is_an_epilogue(library, dtype):
    given, biases = [operands(out=dtype) for _ in range(2)], [aligned((N,), torch.bfloat16) for _ in range(2)]
    for each, bias in zip(given, biases, strict=True):
        gemm.matmul(*each, bias=bias, fast_accumulate=True)
    assert (len(library.searches), library.seen_by_search[8]) == (1, (biases[0].data_ptr(), 8))
    for each, bias, product in zip(given, biases, library.products, strict=True):
        _, attributes, _, at_a, _, at_b, *_ = product
        assert (at_a, at_b) == (each[1].data_ptr(), each[0].data_ptr())
        assert (attributes[17][0], attributes[18][0]) == (each[4].data_ptr(), each[3].data_ptr())
        # the epilogue, its dtype and its place; fast accumulation
        assert (attributes[7], attributes[26], attributes[25]) == ((4, 4), (14, 4), (1, 1))
        assert attributes[8] == (bias.data_ptr(), 8)


def test_add_is_the_matrix_c(library):
    given = operands(out=torch.float32)
    for matrix in (aligned((M, N), torch.float32), given[2]):
        gemm.matmul(*given, add=matrix)
        beta, at_c, of_c, at_d, of_d = library.products[-1][7:12]
        assert (beta, at_c, at_d) == (1.0, matrix.data_ptr(), given[2].data_ptr())
        assert of_c == of_d
    assert len(gemm._plans) == 2


def test_what_differs_in_kind_has_its_own_plan(library):
    gemm.matmul(*operands())
    for other in ({"m": 16}, {"n": 16}, {"k": 16}, {"a": E5M2}, {"b": E5M2}, {"out": torch.float32}):
        gemm.matmul(*operands(**other))
    gemm.matmul(*operands(), bias=aligned((N,), torch.bfloat16))
    gemm.matmul(*operands(), add=aligned((M, N), torch.bfloat16))
    gemm.matmul(*operands(), fast_accumulate=True)
    assert len(library.searches) == 10
    moved = operands()
    moved[0] = aligned((M, K), E4M3, offset=16)
    gemm.matmul(*moved)
    assert (library.preference[5], len(library.searches)) == ((16, 4), 11)


@pytest.mark.parametrize(("when", "status"), [("search", 15), ("product", 13)])
def test_an_error_has_its_name(library, when, status):
    library.refuse[when] = status
    name = {15: "NOT_SUPPORTED", 13: "EXECUTION_FAILED"}[status]
    with pytest.raises(RuntimeError, match=rf"CUBLAS_STATUS_{name} .*\[32, 64\] float8_e4m3fn .*\[48, 64\].* bfloat16"):
        gemm.matmul(*operands())


def test_no_algorithm_is_an_error(library):
    library.found = 0
    with pytest.raises(RuntimeError, match="no algorithm for"):
        gemm.matmul(*operands())
    assert not gemm._plans


WRONG = {
    "inner sizes differ": lambda x: x.__setitem__(1, aligned((N, K + 16), E4M3)),
    "out of another shape": lambda x: x.__setitem__(2, aligned((N, M), torch.bfloat16)),
    "not a multiple of 16": lambda x: x.__setitem__(slice(3), operands(m=24)[:3]),
    "both E5M2": lambda x: x.__setitem__(slice(3), operands(a=E5M2, b=E5M2)[:3]),
    "not FP8": lambda x: x.__setitem__(0, aligned((M, K), torch.bfloat16)),
    "out in fp16": lambda x: x.__setitem__(2, aligned((M, N), torch.float16)),
    "not contiguous": lambda x: x.__setitem__(0, aligned((K, M), E4M3).t()),
    "misaligned": lambda x: x.__setitem__(0, aligned((M, K), E4M3, offset=8)),
    "scale of another type": lambda x: x.__setitem__(3, torch.ones(1, dtype=torch.float64)),
    "many scales": lambda x: x.__setitem__(4, torch.ones(2)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cublaslt_could_not_do_is_refused(library, what):
    given = operands()
    WRONG[what](given)
    with pytest.raises(AssertionError):
        gemm.matmul(*given)
    assert not library.products

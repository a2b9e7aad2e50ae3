"""Every kernel in CUDA C++ at the constants of true widths, compiled for Hopper by NVRTC, which needs no GPU.

ptxas says what costs speed and fails no other test: registers in memory, and matrix instructions that wait for each
other.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from io import StringIO

import pytest
import torch

from gpt2_fp8.kernels import nvrtc, product, weight_gradient
from gpt2_fp8.kernels.formats import Slot

pytestmark = pytest.mark.slow
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = 16384
SPILLED = {"weight_gradient": 4}  # bytes, stored before its loop and read after it
SPILLED_AT_4096 = {"layer_norm_backward": 76}  # of which a block's 1,024 threads have 64 registers each


@pytest.fixture
def asked(monkeypatch):
    """What kernels are compiled with, of calls on the CPU that launch nothing: their names and constants."""
    found = {}

    def kernel(name, constants, device, threads, shared_bytes):
        found[name, tuple((key, int(value)) for key, value in constants.items())] = shared_bytes
        return lambda *launched: None

    monkeypatch.setattr(nvrtc, "kernel", kernel)
    monkeypatch.setattr(nvrtc, "processors", lambda device: 132)
    monkeypatch.setattr(nvrtc, "tensor_map", lambda tensor, box: None)
    return found


def call_all():
    from gpt2_fp8.kernels import cast, layer_norm, probabilities, softmax_cast

    one = torch.ones(1)
    slots = [Slot(one, one, one.clone(), dtype) for dtype in (E4M3, E5M2)]
    empty = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype)  # noqa: E731
    targets = torch.zeros(ROWS, dtype=torch.int64)
    for z_loss in (0.0, 1e-4):
        softmax_cast.softmax_gradient_cast(empty(ROWS, 768), targets, empty(ROWS, 2, dtype=torch.float32), 768, z_loss)
    for dtype in (torch.bfloat16, torch.float32):
        for slot in slots:
            cast.cast_transpose(empty(ROWS, 768, dtype=dtype), slot, sums=dtype == torch.bfloat16)
    for n in (768, 1024, 1280, 1600, 3072, 4096):
        x, weight = empty(ROWS, n), empty(n, dtype=torch.float32)
        for bias in (weight, None):
            layer_norm.layer_norm_transposed(x, weight, bias, 1e-5, slots[0], empty(ROWS, dtype=torch.float32))
            _, _, statistics = layer_norm.layer_norm_cast(x, weight, bias, 1e-5, slots[0])
            for residual in (None, x):
                layer_norm.layer_norm_backward(x, x, statistics, weight, residual, slots[1])
    for k in (768, 1024):
        a, b = empty(ROWS, k, dtype=E4M3), empty(4 * k, k, dtype=E4M3)
        operands = product.Operands(a, b, one, one)
        back = product.Operands(a.view(E5M2), b, one, one)
        for kind in ("gelu", "relu_squared"):
            slopes = product.product_activation(kind, operands, empty(4 * k), slots[0]).slopes
            product.product_activation_backward(kind, back, slopes, one, slots[1])
        probabilities.product_probabilities(operands, empty(ROWS, dtype=torch.float32), targets, 4 * k)
    for left, right, shape in ((E5M2, E4M3, (3072, 768)), (E4M3, E5M2, (768, 3072))):
        given = empty(ROWS, 3072, dtype=left), empty(768, ROWS, dtype=right), empty(*shape, dtype=torch.float32)
        weight_gradient.weight_gradient(*given, one, one, transposed=left == E4M3)


def compile_one(name, constants):
    from cuda.core import Program, ProgramOptions

    macros = [(key, str(value)) for key, value in constants]
    log = StringIO()
    options = ProgramOptions(std="c++17", arch="sm_90a", define_macro=macros, ptxas_options=["-v", "-warn-spills"])
    Program(nvrtc.source_of(name), "c++", options).compile("cubin", logs=log)
    return log.getvalue()


def test_no_kernel_spills_and_no_matrix_instruction_waits_for_another(asked):
    pytest.importorskip("triton")
    pytest.importorskip("cuda.core")
    call_all()
    assert {name for name, _ in asked} == {file.stem for file in nvrtc.SOURCES.glob("*.cu")}
    with ThreadPoolExecutor(2) as pool:
        logs = pool.map(lambda case: compile_one(*case), asked)
    for (name, constants), log in zip(asked, logs, strict=True):
        spilled = [int(size) for size in re.findall(r"(\d+) bytes spill", log)]
        assert spilled, "ptxas says so of every kernel"
        known = SPILLED_AT_4096 if ("N", 4096) in constants else SPILLED
        assert max(spilled) <= known.get(name, 0), (name, constants, log)
        assert "C75" not in log, (name, constants, log)  # ptxas's warnings of serialised matrix instructions

"""FP8 GEMMs that can add a matrix and accumulate in place, through cuBLASLt.

`torch._scaled_mm` has no beta. Everything that a GEMM needs except its addresses is made once for each kind (a `Plan`).
A call sets two or three addresses and launches.

cuBLASLt is column-major. Our out [M, N] = a [M, K] b^T [K, N] is its D [N, M] = A^T B; A is b and B is a. This is the
only arrangement (TN) in which Hopper multiplies FP8. Its bias runs along its rows, which are our columns.

cuBLASLt ranks its algorithms by a model of the GPU. For GPT-2's sizes the best one is often not the first: in many
forward GEMMs on an H200 it is 3 to 25 % faster. So a plan times the candidates. Most differ only in their tiles and sum
in the same order: their results are equal to the last bit. One with another result is rejected, so a run's numbers do
not depend on the choice.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt2_fp8.compat.torch_private import current_raw_stream
from gpt2_fp8.kernels import cublaslt as lt

log = logging.getLogger(__name__)

WORKSPACE_BYTES = 32 * 2**20  # NVIDIA's recommendation for Hopper
CANDIDATES = 16  # algorithms requested from cuBLASLt
LAUNCHES = 5  # timed launches of each algorithm
GAIN = 0.99  # an algorithm must be at least 1 % faster
WORTH_MULTIPLICATIONS = 2**34  # smaller GEMMs have little to gain
SLICE_ELEMENTS = 2**24  # compared at a time
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))

_ONE, _ZERO = (ctypes.byref(ctypes.c_float(value)) for value in (1.0, 0.0))
_plans: dict[tuple, Plan] = {}
_workspaces: dict[tuple[int, int], Tensor] = {}  # by device and stream
_lock = threading.Lock()  # a plan's addresses are set and used under it; autograd has its own thread

# Addresses of a, b, out, add (0: none), bias (0: none), a_scale_inv, b_scale_inv.
Addresses = tuple[int, int, int, int, int, int, int]
Launch = Callable[[Any, Tensor], int]  # runs an algorithm into an output; returns cuBLASLt's status


def matmul(
    a: Tensor, b: Tensor, out: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor,
    *, bias: Tensor | None = None, add: Tensor | None = None, fast_accumulate: bool = False,
) -> Tensor:  # fmt: skip
    """Compute out = (a @ b^T) * a_scale_inv * b_scale_inv [+ bias] [+ add], on the current stream.

    Autograd does not see it. a: [M, K], b: [N, K], each float8_e4m3fn or float8_e5m2, not both the latter. out: [M, N]
    bf16 or float32, written in place and returned. a_scale_inv, b_scale_inv: float32, one element: the reciprocal of
    the scale with which the operand was quantized. bias: [N] bf16, for either dtype of out. add: [M, N] of out's dtype;
    `out` itself to accumulate in place. `fast_accumulate` sums only in the tensor cores, which is faster and less
    exact.

    All tensors are on the current CUDA device, contiguous, at multiples of 16 bytes; M, N and K are multiples of 16. A
    call does not wait for the device. It allocates memory only if it is the first of its kind or the first on its
    stream. So capture it in a CUDA graph after one call outside. Raises RuntimeError with cuBLASLt's status.
    """
    device = a.get_device()
    at_a, at_b, at_out = _at(a, device), _at(b, device), _at(out, device)
    at_add = 0 if add is None else _at(add, device, out.shape, out.dtype)
    at_bias = 0 if bias is None else _at(bias, device, out.shape[1:], torch.bfloat16)
    assert a_scale_inv.numel() == b_scale_inv.numel() == 1, (a_scale_inv.shape, b_scale_inv.shape)
    at_a_scale = _at(a_scale_inv, device, dtype=torch.float32)
    at_b_scale = _at(b_scale_inv, device, dtype=torch.float32)
    bits = at_a | at_b | at_out | at_add | at_bias
    alignment = min(bits & -bits, 256)
    assert alignment >= 16, f"every tensor starts at a multiple of 16 bytes, not of {alignment}"
    kind = (
        device, a.shape, b.shape, out.shape, a.dtype, b.dtype, out.dtype,
        at_bias != 0, at_add != 0, at_add == at_out, fast_accumulate, alignment,
    )  # fmt: skip
    addresses = (at_a, at_b, at_out, at_add, at_bias, at_a_scale, at_b_scale)
    plan = _plans.get(kind)
    if plan is None:
        plan = _plans[kind] = Plan(a, b, out, addresses, fast_accumulate, alignment)
    if status := plan.launch(addresses):
        lt.check(status, plan.what)
    return out


def _at(tensor: Tensor, device: int, shape: torch.Size | None = None, dtype: torch.dtype | None = None) -> int:
    """Check a tensor and return its address."""
    assert tensor.get_device() == device, (tensor.device, device)
    assert tensor.is_contiguous(), "tensors are contiguous"
    assert shape is None or tensor.shape == shape, (tensor.shape, shape)
    assert dtype is None or tensor.dtype is dtype, (tensor.dtype, dtype)
    return tensor.data_ptr()


class Plan:
    """One kind of GEMM: cuBLASLt's description of it, and the algorithm for it."""

    def __init__(
        self, a: Tensor, b: Tensor, out: Tensor, addresses: Addresses, fast_accumulate: bool, alignment: int
    ) -> None:
        assert a.dim() == b.dim() == 2, (a.shape, b.shape)
        (m, k), n = a.shape, b.shape[0]
        assert (k, *out.shape) == (b.shape[1], m, n), (a.shape, b.shape, out.shape)
        assert all(size > 0 and size % 16 == 0 for size in (m, n, k)), f"{(m, n, k)} are not all multiples of 16"
        assert (a.dtype, b.dtype) in PAIRS, (a.dtype, b.dtype)
        assert out.dtype in (torch.bfloat16, torch.float32), out.dtype
        self.device = a.get_device()
        self.what = (
            f"[{m}, {k}] {a.dtype} times [{n}, {k}]^T {b.dtype} to {out.dtype}"
            f"{' + bias' if addresses[4] else ''}{' + matrix' if addresses[3] else ''}"
        ).replace("torch.", "")
        self._handle = lt.handle(self.device)
        *_, bias, a_scale, b_scale = addresses
        self._bias, self._scale_of_a, self._scale_of_b = map(ctypes.c_void_p, (bias, b_scale, a_scale))
        self._where = tuple(ctypes.byref(at) for at in (self._scale_of_a, self._scale_of_b, self._bias))
        self._product = lt.describe(self._attributes(fast_accumulate))
        self._a, self._b, self._out = lt.layout(b.dtype, k, n), lt.layout(a.dtype, k, m), lt.layout(out.dtype, n, m)
        layouts = (self._a, self._b, self._out, self._out)
        results = lt.search(self._handle, self._product, layouts, alignment, WORKSPACE_BYTES, CANDIDATES, self.what)
        self._set, self._multiply = lt.library().cublasLtMatmulDescSetAttribute, lt.library().cublasLtMatmul
        self._algorithm = ctypes.byref(results[0].algorithm)
        if m * n * k >= WORTH_MULTIPLICATIONS and not torch.cuda.is_current_stream_capturing():
            self._tune([result.algorithm for result in results], a, b, out, addresses)

    def _tune(self, algorithms: list[lt.Algorithm], a: Tensor, b: Tensor, out: Tensor, addresses: Addresses) -> None:
        """Choose an algorithm on its own operands, since those of a first call may be zeros.

        Without memory for them, cuBLASLt's first choice stays.
        """
        _, _, at_out, add, bias, *_ = addresses
        try:
            # A chunk's logits are 1.6 GB, so `out` itself is scratch memory if nothing is added to it.
            spare = torch.empty_like(out) if add == at_out else out
            one, scratch = torch.ones(1, device=out.device), torch.empty_like(out)
            x, y = _draw_operand(a), _draw_operand(b)
            more = torch.ones_like(out) if add and add != at_out else None
            row = torch.ones(out.shape[1], dtype=torch.bfloat16, device=out.device) if bias else None

            def launch(algorithm: lt.Algorithm, to: Tensor) -> int:
                self._algorithm, at = ctypes.byref(algorithm), to.data_ptr()
                at_more, at_row = at if more is None else more.data_ptr(), 0 if row is None else row.data_ptr()
                at_one = one.data_ptr()
                return self.launch((x.data_ptr(), y.data_ptr(), at, at_more if add else 0, at_row, at_one, at_one))

            chosen = find_fastest(algorithms, launch, scratch, spare)
        except torch.OutOfMemoryError:
            log.info("no memory to time cuBLASLt's algorithms for %s: its first choice stays", self.what)
            chosen = algorithms[0]
        self._algorithm = ctypes.byref(chosen)

    def _attributes(self, fast_accumulate: bool) -> dict[int, ctypes._SimpleCData]:
        """Return the attributes of the GEMM's descriptor.

        They include the addresses of scales and bias, because cuBLASLt's search looks at their alignment.
        """
        attributes: dict[int, ctypes._SimpleCData] = {
            lt.TRANSA: ctypes.c_int32(lt.OP_T),
            lt.TRANSB: ctypes.c_int32(lt.OP_N),
            lt.FAST_ACCUM: ctypes.c_int8(fast_accumulate),
            lt.A_SCALE_POINTER: self._scale_of_a,
            lt.B_SCALE_POINTER: self._scale_of_b,
        }
        if self._bias.value:
            attributes[lt.EPILOGUE] = ctypes.c_uint32(lt.EPILOGUE_BIAS)
            attributes[lt.BIAS_DATA_TYPE] = ctypes.c_int32(lt.CUDA_TYPES[torch.bfloat16])
            attributes[lt.BIAS_POINTER] = self._bias
        return attributes

    def launch(self, addresses: Addresses) -> int:
        """Compute the GEMM of the tensors at these addresses, on the device's current stream.

        Returns cuBLASLt's status.
        """
        a, b, out, add, bias, a_scale, b_scale = addresses
        stream, product, put = current_raw_stream(self.device), self._product, self._set
        workspace = _workspaces.get((self.device, stream))
        if workspace is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{self.device}")
            _workspaces[self.device, stream] = workspace
        of_a, of_b, of_bias = self._where
        with _lock:
            self._scale_of_a.value, self._scale_of_b.value, self._bias.value = b_scale, a_scale, bias
            return (
                put(product, lt.A_SCALE_POINTER, of_a, 8)
                or put(product, lt.B_SCALE_POINTER, of_b, 8)
                or (bias and put(product, lt.BIAS_POINTER, of_bias, 8))
                or self._multiply(
                    self._handle, product, _ONE, b, self._a, a, self._b, _ONE if add else _ZERO, add or out, self._out,
                    out, self._out, self._algorithm, workspace.data_ptr(), WORKSPACE_BYTES, stream,
                )
            )  # fmt: skip


def find_fastest(algorithms: Sequence[Any], launch: Launch, out: Tensor, spare: Tensor) -> Any:
    """Return the algorithm to use; the first of `algorithms` is cuBLASLt's choice. Waits for the device.

    `launch(algorithm, out)` multiplies operands that do not change. `out` and `spare` are scratch memory of the same
    shape.
    """
    seconds = [_time(algorithm, launch, out) for algorithm in algorithms]
    order = sorted(range(len(seconds)), key=seconds.__getitem__)
    candidates = [i for i in order if seconds[i] < GAIN * seconds[0]]
    if not candidates:
        return algorithms[0]
    want = _compute(algorithms[0], launch, spare)
    for i in candidates:
        if _have_same_bits(_compute(algorithms[i], launch, out), want):
            return algorithms[i]
    return algorithms[0]


def _time(algorithm: Any, launch: Launch, out: Tensor) -> float:
    """Return the median time of several launches; infinity for an algorithm that refuses."""
    if launch(algorithm, out):
        return float("inf")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(LAUNCHES + 1)]
    marks[0].record()
    for mark in marks[1:]:
        launch(algorithm, out)
        mark.record()
    marks[-1].synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(marks))


def _compute(algorithm: Any, launch: Launch, out: Tensor) -> Tensor:
    out.fill_(1.0)  # what an accumulating GEMM starts from
    launch(algorithm, out)
    return out


def _have_same_bits(got: Tensor, want: Tensor) -> bool:
    """Return whether two tensors have the same bits. It compares slices, since a comparison needs memory too."""
    pairs = zip(got.view(-1).split(SLICE_ELEMENTS), want.view(-1).split(SLICE_ELEMENTS), strict=True)
    return all(torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in pairs)


def _draw_operand(like: Tensor) -> Tensor:
    """Draw normal numbers of a tensor's shape and dtype from an own generator: the global one belongs to the run."""
    generator = torch.Generator(like.device).manual_seed(like.numel())
    made = torch.empty_like(like)
    for part in made.view(-1).split(SLICE_ELEMENTS):
        part.copy_(torch.randn(part.shape, device=like.device, generator=generator))
    return made

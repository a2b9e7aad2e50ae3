"""The few functions of cuBLASLt that `gemm` calls, through ctypes, from the library that torch has already loaded.

Numbers, sizes and signatures are those of cublasLt.h 13.1; they are the same in CUDA 12. Importing this module needs no
CUDA: the library is loaded at its first use.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

OP_N, OP_T = 0, 1
COMPUTE_32F = 68
CUDA_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
EPILOGUE_BIAS = 4

# attributes of a GEMM (cublasLtMatmulDescAttributes_t), each with its type in C
TRANSA, TRANSB = 3, 4  # int32
EPILOGUE = 7  # uint32
BIAS_POINTER = 8  # void *
A_SCALE_POINTER, B_SCALE_POINTER = 17, 18  # void *
FAST_ACCUM = 25  # int8
BIAS_DATA_TYPE = 26  # int32

# attributes of a search for an algorithm (cublasLtMatmulPreferenceAttributes_t)
MAX_WORKSPACE_BYTES = 1  # uint64
MIN_ALIGNMENT_BYTES = (5, 6, 7, 8)  # of A, B, C, D; uint32


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: 64 opaque bytes."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and what it needs; 96 bytes."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def library() -> Any:
    """Return cuBLASLt with its functions declared. Raises RuntimeError if there is none."""
    pointer, int32, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    signatures = {
        "cublasLtCreate": [pointer],
        "cublasLtMatmulDescCreate": [pointer, int32, int32],
        "cublasLtMatmulDescSetAttribute": [pointer, int32, pointer, size],
        "cublasLtMatrixLayoutCreate": [pointer, int32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
        "cublasLtMatmulPreferenceCreate": [pointer],
        "cublasLtMatmulPreferenceSetAttribute": [pointer, int32, pointer, size],
        "cublasLtMatmulPreferenceDestroy": [pointer],
        "cublasLtMatmulAlgoGetHeuristic": [*[pointer] * 7, int32, pointer, pointer],
        # handle, descriptor, alpha, A and layout, B and layout, beta, C and layout, D and layout, algorithm, workspace,
        # its bytes, stream
        "cublasLtMatmul": [*[pointer] * 14, size, pointer],
    }
    loaded = _open()
    for name, arguments in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    loaded.cublasLtGetStatusName.argtypes = [ctypes.c_int]
    loaded.cublasLtGetStatusName.restype = ctypes.c_char_p
    return loaded


def version() -> int:
    """Return cuBLASLt's own version: 130100 is 13.1.0. Raises RuntimeError if there is none."""
    ask = library().cublasLtGetVersion
    ask.argtypes, ask.restype = [], ctypes.c_size_t
    return int(ask())


def _open() -> ctypes.CDLL:
    """Load torch's own copy.

    A library that is already loaded is found by its name under any search path. Otherwise it is next to torch.
    """
    majors = dict.fromkeys(((torch.version.cuda or "13").partition(".")[0], "13", "12"))
    packages = Path(torch.__file__).parents[1]
    for name in (f"libcublasLt.so.{major}" for major in majors):
        places = [*packages.glob(f"nvidia/*/lib/{name}"), packages / "torch" / "lib" / name]
        for place in [name, *map(str, places)]:
            try:
                return ctypes.CDLL(place)
            except OSError:
                continue
    raise RuntimeError("cuBLASLt (libcublasLt.so.13 or .12) is neither loaded nor installed next to torch")


@cache
def handle(device: int) -> ctypes.c_void_p:
    """Return cuBLASLt's context on a CUDA device, created once. Torch has initialised the device.

    Raises RuntimeError.
    """
    assert device >= 0, "cuBLASLt computes on CUDA devices"
    made = ctypes.c_void_p()
    with torch.cuda.device(device):
        check(library().cublasLtCreate(ctypes.byref(made)), f"a cuBLASLt handle on cuda:{device}")
    return made


def check(status: int, what: str) -> None:
    """Raise RuntimeError, with the status' name, if a call did not succeed."""
    if status:
        name = library().cublasLtGetStatusName(status).decode()
        raise RuntimeError(f"cuBLASLt: {name} ({status}) for {what}")


def describe(attributes: dict[int, Any]) -> ctypes.c_void_p:
    """Create the descriptor of a GEMM with float32 arithmetic and scales.

    `attributes`: ctypes objects of each attribute's own type, by its number.
    """
    made = ctypes.c_void_p()
    float32 = CUDA_TYPES[torch.float32]
    check(library().cublasLtMatmulDescCreate(ctypes.byref(made), COMPUTE_32F, float32), "a matmul's descriptor")
    for number, value in attributes.items():
        status = library().cublasLtMatmulDescSetAttribute(made, number, ctypes.byref(value), ctypes.sizeof(value))
        check(status, f"attribute {number} of a matmul")
    return made


def layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    """Create the layout of a column-major matrix without gaps: in torch's terms [columns, rows], contiguous."""
    made = ctypes.c_void_p()
    kind = CUDA_TYPES[dtype]
    check(library().cublasLtMatrixLayoutCreate(ctypes.byref(made), kind, rows, columns, rows), f"a layout of {dtype}")
    return made


def search(
    handle: ctypes.c_void_p, descriptor: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...], alignment: int,
    workspace_bytes: int, count: int, what: str,
) -> list[Result]:  # fmt: skip
    """Find up to `count` algorithms for a GEMM, in order of their estimated speed.

    `layouts` are those of A, B, C and D; their addresses are multiples of `alignment` bytes. Raises RuntimeError if
    there is no algorithm.
    """
    lt, wish, found = library(), ctypes.c_void_p(), ctypes.c_int()
    check(lt.cublasLtMatmulPreferenceCreate(ctypes.byref(wish)), "a preference")
    try:
        wishes: dict[int, Any] = {MAX_WORKSPACE_BYTES: ctypes.c_uint64(workspace_bytes)}
        wishes |= {number: ctypes.c_uint32(alignment) for number in MIN_ALIGNMENT_BYTES}
        for number, value in wishes.items():
            size = ctypes.sizeof(value)
            status = lt.cublasLtMatmulPreferenceSetAttribute(wish, number, ctypes.byref(value), size)
            check(status, f"attribute {number} of a preference")
        results = (Result * count)()
        status = lt.cublasLtMatmulAlgoGetHeuristic(
            handle, descriptor, *layouts, wish, count, results, ctypes.byref(found)
        )
        check(status, what)
    finally:
        lt.cublasLtMatmulPreferenceDestroy(wish)
    usable = [result for result in results[: found.value] if result.state == 0]
    if not usable:
        raise RuntimeError(f"cuBLASLt: no algorithm for {what}")
    return usable

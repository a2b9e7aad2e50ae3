"""Measure what matrix units reach in each format: square products of torch, TFLOP/s, the best of five times ten.

    python docs/studies/peaks.py 8192

On a GPU, or on a CPU where there is none.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import program
import torch
from torch import Tensor

from gpt2_fp8.compat import torch_private
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime.arguments import Parser

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(argv: list[str] | None = None) -> int:
    """Print a line for each format. Returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", type=int, help="rows and columns of the matrices, a multiple of 16")
    try:
        size = parser.parse_args(sys.argv[1:] if argv is None else argv).size
        if size < 16 or size % 16:
            raise UserError.of(f"{size} is no multiple of 16", "python docs/studies/peaks.py 8192")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    _tell_each(size)
    return 0


def _tell_each(size: int) -> None:
    a, b = (torch.randn(size, size, device=DEVICE) for _ in "ab")
    low, lower = (a.bfloat16(), b.bfloat16()), (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t())
    one = torch.ones((), device=DEVICE)
    for tf32 in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        _tell("TF32" if tf32 else "float32", size, lambda: a @ b)
    _tell("bfloat16", size, lambda: low[0] @ low[1])
    _tell("FP8 (E4M3)", size, lambda: torch_private.fp8_product(*lower, one, one, fast=False))
    _tell("FP8 (E4M3), fast accumulation", size, lambda: torch_private.fp8_product(*lower, one, one, fast=True))


def _tell(name: str, size: int, product: Callable[[], Tensor]) -> None:
    product()
    _seconds(product)
    print(f"{name:30} {2e-12 * size**3 / min(_seconds(product) for _ in range(5)):8.4g} TFLOP/s")


def _seconds(product: Callable[[], Tensor], times: int = 10) -> float:
    start = time.perf_counter()
    for _ in range(times):
        product()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


if __name__ == "__main__":
    program.run(main)

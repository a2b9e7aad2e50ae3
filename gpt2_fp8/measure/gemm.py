"""The ceiling of GEMMs here, by a model's shapes: `python -m gpt2_fp8.measure.gemm OUT < REQUEST`.

A linear layer y[M, N] = x[M, K] W[N, K]^T is three GEMMs of 2 M N K FLOPs: forward, input gradient (dgrad, dy W) and
weight gradient (wgrad, dy^T x). Each is timed in bf16 through `torch.matmul`, with the layout that torch's autograd
has. Each is also timed in FP8 through `torch._scaled_mm`, with one scale for each tensor. Formats are those of hybrid
FP8: forward e4m3 x e4m3 with fast accumulation, backward e5m2 x e4m3 without it. Results are bf16.

FP8 on Hopper multiplies rows by columns that are both contiguous along the summed dimension, so backward needs
transposed copies. Here they exist before timing starts: **quantization and transposes are not in the figures**, and no
training step reaches them. Operands rotate through more memory than the L2 cache holds. They are random, since zeros
draw less power.

REQUEST: {"models": [ModelConfig, ...], "rows": M}. Each model has its vocab_size; M is micro_batch_size x n_positions.
On a CPU M is small, there is no FP8, and float32 replaces bf16, as in a run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from gpt2_fp8.compat.torch_private import fp8_product
from gpt2_fp8.config import parsing
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.measure import timing
from gpt2_fp8.measure.timing import Row
from gpt2_fp8.model.gpt2 import padded_vocabulary
from gpt2_fp8.precision.support import NEEDED

Pass = Literal["forward", "dgrad", "wgrad"]
PASSES: tuple[Pass, ...] = ("forward", "dgrad", "wgrad")
COLUMNS = ("dtype", "tflops", "fp8_tflops", "ratio")

CPU_ROWS = 128
DEFAULT_L2_BYTES = 64 * 2**20


def rows(request: Row) -> Iterator[Row]:
    """Yield a row for each distinct GEMM and pass."""
    device = timing.here()
    m = request["rows"] if device == "cuda" else min(CPU_ROWS, request["rows"])
    models = [_model(data) for data in request["models"]]
    for (k, n), names in linear_widths(models).items():
        for kind in PASSES:
            row = {"product": ", ".join(names), "pass": kind, "M": m, "K": k, "N": n}
            yield _measured(row, sizes(kind, m, k, n), kind, device)


def linear_widths(models: list[ModelConfig]) -> dict[tuple[int, int], list[str]]:
    """Return the input and output widths of all linear layers, each once, with the names of the layers.

    The head's output width is the padded vocabulary's size.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for model in models:
        assert model.vocab_size is not None
        spec, vocabulary = block_spec(model), padded_vocabulary(model.vocab_size)
        d, heads, mlp = spec.n_embd, spec.heads, spec.mlp
        widths = {
            "qkv": (d, heads.packed),
            "projection": (heads.queries, d),
            "fc1": (d, mlp.projected),
            "fc2": (mlp.width, d),
            "head": (d, vocabulary),
        }
        for name, shape in widths.items():
            found.setdefault(shape, []).append(f"{model.name} {name}")
    return found


def sizes(kind: Pass, m: int, k: int, n: int) -> tuple[int, int, int]:
    """Return rows, summed dimension and columns of a layer's GEMM."""
    return {"forward": (m, k, n), "dgrad": (m, n, k), "wgrad": (n, m, k)}[kind]


def plain_operands(kind: Pass, size: tuple[int, int, int], device: str) -> tuple[Tensor, Tensor]:
    """Create both operands, [rows, summed] and [summed, columns], in the memory layout that autograd has."""
    rows_, summed, columns = size
    a = _random(summed, rows_, device).t() if kind == "wgrad" else _random(rows_, summed, device)
    b = _random(columns, summed, device).t() if kind == "forward" else _random(summed, columns, device)
    return a, b


def fp8_operands(kind: Pass, size: tuple[int, int, int], device: str) -> tuple[Tensor, Tensor]:
    """Create the same in FP8: the first row-major, the second column-major, as `torch._scaled_mm` needs them."""
    rows_, summed, columns = size
    first = torch.float8_e4m3fn if kind == "forward" else torch.float8_e5m2
    return (
        _random(rows_, summed, device).to(first),
        _random(columns, summed, device).to(torch.float8_e4m3fn).t(),
    )


def _measured(row: Row, size: tuple[int, int, int], kind: Pass, device: str) -> Row:
    found = timing.measured(row, COLUMNS, lambda: _plain(kind, size, device))
    if device == "cpu":
        found["message"] = found["message"] or f"on the CPU, with M={row['M']}; no FP8"
    elif torch.cuda.get_device_capability() < NEEDED:
        found["message"] = found["message"] or "this GPU has no FP8"
    else:
        fp8 = timing.measured({}, (), lambda: {"fp8_tflops": _fp8(kind, size, device)})
        if fp8["status"] != "ok" and found["status"] == "ok":
            found.update(status=fp8["status"], message=f"FP8: {fp8['message']}")
        found["fp8_tflops"] = fp8.get("fp8_tflops")
    if found["tflops"] and found["fp8_tflops"]:
        found["ratio"] = found["fp8_tflops"] / found["tflops"]
    return found


def _plain(kind: Pass, size: tuple[int, int, int], device: str) -> Row:
    operands = itertools.cycle([plain_operands(kind, size, device) for _ in range(_copies(size, 2, device))])
    seconds = timing.seconds_per_call(lambda: torch.matmul(*next(operands)), device)
    return {"dtype": "bf16" if device == "cuda" else "fp32", "tflops": _tflops(size, seconds)}


def _fp8(kind: Pass, size: tuple[int, int, int], device: str) -> float:
    operands = itertools.cycle([fp8_operands(kind, size, device) for _ in range(_copies(size, 1, device))])
    one = torch.ones((), dtype=torch.float32, device=device)

    def product() -> Tensor:
        a, b = next(operands)
        return fp8_product(a, b, one, one, fast=kind == "forward")

    return _tflops(size, timing.seconds_per_call(product, device))


def _tflops(size: tuple[int, int, int], seconds: float) -> float:
    return 2 * math.prod(size) / seconds / 1e12


def _copies(size: tuple[int, int, int], bytes_each: int, device: str) -> int:
    """Return how many pairs of operands take together four times the L2 cache."""
    if device == "cpu":
        return 1
    rows_, summed, columns = size
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or DEFAULT_L2_BYTES
    return max(1, math.ceil(4 * cache / (bytes_each * summed * (rows_ + columns))))


def _random(rows_: int, columns: int, device: str) -> Tensor:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(rows_, columns, dtype=dtype, device=device)


def _model(data: dict[str, Any]) -> ModelConfig:
    model, found = parsing.build(ModelConfig, data)
    assert model is not None, found
    return model


if __name__ == "__main__":
    timing.program(rows)

"""Causal attention by every installed kernel: `python -m gpt2_fp8.measure.attention OUT < REQUEST`.

**Each row starts from one packed bf16 tensor [batch, tokens, channels], as a model's QKV linear writes it, and ends in
that tensor's packed gradient**. So its figures include what a kernel needs for splitting and copying. Tables of kernels
without that show higher figures.

FLOPs are 4 batch n_head tokens^2 head_size / 2 forward (the masked half of the matrix is not counted), and 3.5 times
that with backward. "forward" keeps what backward needs. "error" is the relative L2 distance of the first sequence's
result and gradient from float32: it shows a kernel that computes something else. "times_standard" is the speed of
forward and backward, relative to materialised softmax. Memory is the peak of allocated GiB, with the packed tensor and
its gradient.

REQUEST: {"models": [ModelConfig, ...], "micro_batch_size": B}. On a GPU the first model's heads are also measured with
8 sequences of 2,048 tokens, a shape in published tables. On a CPU shapes are small.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpt2_fp8.config import parsing
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.measure import timing
from gpt2_fp8.measure.attention_kernels import KERNELS, Attend, Build, Shape, materialised
from gpt2_fp8.measure.timing import Row

COLUMNS = (
    "forward_ms", "forward_tflops", "both_ms", "both_tflops", "times_standard", "peak_memory_gb", "error",
)  # fmt: skip
BACKWARD = 2.5  # FLOPs of backward relative to forward: five GEMMs, one of them a recomputation, to two
PUBLISHED = (8, 2048)
ON_CPU = (1, 64)  # at most


def rows(request: Row) -> Iterator[Row]:
    """Yield a row for each shape and kernel."""
    device = timing.here()
    shapes = [_shape(data, request["micro_batch_size"]) for data in request["models"]]
    if device == "cpu":
        shapes = [(n, s._replace(batch=min(s.batch, ON_CPU[0]), tokens=min(s.tokens, ON_CPU[1]))) for n, s in shapes]
    elif shapes:
        name, shape = shapes[0]
        shapes.append((f"{name}'s heads", shape._replace(batch=PUBLISHED[0], tokens=PUBLISHED[1])))
    for name, shape in shapes:
        standard_ms = None
        for kernel, (build, *distributions) in KERNELS.items():
            about = {"model": name, **shape._asdict(), "kernel": kernel, "version": timing.version(*distributions)}
            row = timing.measured(about, COLUMNS, lambda b=build, s=shape: measure(b, s, device))  # type: ignore[misc]
            if kernel == "standard":
                standard_ms = row["both_ms"]
            if standard_ms and row["both_ms"]:
                row["times_standard"] = standard_ms / row["both_ms"]
            if device == "cpu":
                row["message"] = row["message"] or "on the CPU, at a small shape"
            yield row


def _shape(data: Row, batch: int) -> tuple[str, Shape]:
    model, found = parsing.build(ModelConfig, data)
    assert model is not None, found
    heads = block_spec(model).heads
    return model.name, Shape(batch, model.n_positions, heads.n_head, heads.size, heads.n_kv_head)


def forward_flops(shape: Shape) -> float:
    """Count the FLOPs of both forward GEMMs, over the half of the matrix that is not masked."""
    return 4 * shape.batch * shape.n_head * shape.tokens**2 * shape.head_size / 2


def measure(build: Build, shape: Shape, device: str) -> Row:
    """Measure a kernel on random queries, keys and values."""
    attend = build(shape, device)
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": device}
    packed = torch.randn(shape.batch, shape.tokens, shape.heads.packed, **options).requires_grad_()  # type: ignore[call-overload]
    upstream = torch.randn(shape.batch, shape.tokens, shape.heads.queries, **options)  # type: ignore[call-overload]

    def both() -> Tensor:
        return torch.autograd.grad(attend(packed), packed, upstream)[0]

    found: Row = {"error": _error(attend, packed, upstream, shape, device)}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    forward_s = timing.seconds_per_call(lambda: attend(packed), device)
    both_s = timing.seconds_per_call(both, device)
    if device == "cuda":
        found["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    flops = forward_flops(shape)
    return found | {
        "forward_ms": forward_s * 1e3,
        "forward_tflops": flops / forward_s / 1e12,
        "both_ms": both_s * 1e3,
        "both_tflops": (1 + BACKWARD) * flops / both_s / 1e12,
    }


def _error(attend: Attend, packed: Tensor, upstream: Tensor, shape: Shape, device: str) -> float:
    """Compute the larger of the errors of result and gradient, on the first sequence.

    `attend` gets the whole batch, because a library may choose its kernel by the batch.
    """
    exact = packed[:1].detach().float().requires_grad_()
    y = materialised(shape, device)(exact)
    (gradient,) = torch.autograd.grad(y, exact, upstream[:1].float())
    mine = attend(packed)
    (my_gradient,) = torch.autograd.grad(mine, packed, upstream)
    pairs = ((mine, y), (my_gradient, gradient))
    return max(((a[:1].detach().float() - b.detach()).norm() / b.norm()).item() for a, b in pairs)


if __name__ == "__main__":
    timing.program(rows)

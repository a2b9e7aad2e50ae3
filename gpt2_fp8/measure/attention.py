"""Causal attention by every installed kernel: `python -m gpt2_fp8.measure.attention OUT < REQUEST`.

**Each row starts from one packed bf16 tensor [batch, tokens, channels], as a model's QKV linear writes it, and ends in
that tensor's packed gradient**. So its figures include what a kernel needs for splitting and copying. Tables of kernels
without that show higher figures. Each kernel is called in the cheapest way that it offers.

FLOPs are 4 batch n_head tokens^2 head_size / 2 forward (the masked half of the matrix is not counted), and 3.5 times
that with backward. "forward" keeps what backward needs. "error" is the relative L2 distance of the first sequence's
result and gradient from float32: it shows a kernel that computes something else. "times_standard" is the speed of
forward and backward, relative to materialised softmax. Memory is the peak of allocated GiB, with the packed tensor and
its gradient.

REQUEST: {"models": [ModelConfig, ...], "micro_batch_size": B}. On a GPU the first model's heads are also measured with
8 sequences of 2,048 tokens, a shape in published tables. On a CPU shapes are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2_fp8.config import parsing
from gpt2_fp8.config.block_spec import Heads, block_spec
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.layers import reference, te
from gpt2_fp8.measure import timing
from gpt2_fp8.measure.timing import Row, Unavailable, installed

COLUMNS = (
    "forward_ms", "forward_tflops", "both_ms", "both_tflops", "times_standard", "peak_memory_gb", "error",
)  # fmt: skip
BACKWARD = 2.5  # FLOPs of backward relative to forward: five GEMMs, one of them a recomputation, to two
PUBLISHED = (8, 2048)
ON_CPU = (1, 64)  # at most


class Shape(NamedTuple):
    """The sizes of one attention."""

    batch: int
    tokens: int
    n_head: int
    head_size: int
    n_kv_head: int | None = None  # None: as many as n_head

    @property
    def heads(self) -> Heads:
        """The heads, as a layer takes them. RoPE and QK-norm are no part of what is measured."""
        return Heads(self.n_head, self.n_kv_head or self.n_head, self.head_size)


Attend = Callable[[Tensor], Tensor]  # packed [batch, tokens, heads.packed] -> [batch, tokens, heads.queries]


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


def measure(build: Callable[[Shape, str], Attend], shape: Shape, device: str) -> Row:
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


def materialised(shape: Shape, device: str) -> Attend:
    """Build attention with a matrix of scores in memory, as before there were fused kernels."""
    masked = torch.ones(shape.tokens, shape.tokens, dtype=torch.bool, device=device).triu(1)

    def attend(packed: Tensor) -> Tensor:
        parts = packed.split([shape.heads.queries, shape.heads.keys, shape.heads.keys], dim=2)
        q, k, v = (part.unflatten(2, (-1, shape.head_size)).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(shape.n_head // shape.heads.n_kv_head, dim=1) for part in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(shape.head_size)
        return (scores.masked_fill(masked, -math.inf).softmax(dim=3) @ v).transpose(1, 2).flatten(2)

    return attend


def _standard(shape: Shape, device: str) -> Attend:
    if device == "cuda":
        # bytes of the matrices that live at the same time in backward
        needed = 5 * 2 * shape.batch * shape.n_head * shape.tokens**2
        free = torch.cuda.mem_get_info()[0]
        if needed > free:
            text = f"its matrices need about {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} are free"
            raise Unavailable("skipped", text)
    return materialised(shape, device)


def _sdpa(backend: str) -> Callable[[Shape, str], Attend]:
    """Return the builder of the model's own plain-torch layer, limited to one of torch's kernels."""

    def build(shape: Shape, device: str) -> Attend:
        if not hasattr(SDPBackend, backend):
            raise Unavailable("refused", f"torch {torch.__version__} does not know it")
        layer, chosen = reference.Attention(shape.heads, dropout=0.0), getattr(SDPBackend, backend)

        def attend(packed: Tensor) -> Tensor:
            try:
                with sdpa_kernel(chosen):
                    return layer(packed)
            except RuntimeError as error:
                if "No available kernel" in str(error) or "No viable backend" in str(error):
                    raise Unavailable("refused", "torch has no such kernel for this device and shape") from error
                raise

        return attend

    return build


def _transformer_engine(shape: Shape, device: str) -> Attend:
    """Build the model's own layer: layout bshd, split by SplitAlongDim, whose backward does not copy."""
    installed("transformer_engine.pytorch")
    return te.attention(shape.heads, dropout=0.0)


def _flash_2(shape: Shape, device: str) -> Attend:
    return _packed(installed("flash_attn.flash_attn_interface").flash_attn_qkvpacked_func, shape)


def _flash_3(shape: Shape, device: str) -> Attend:
    return _packed(installed("flash_attn_interface").flash_attn_qkvpacked_func, shape)


def _flash_4(shape: Shape, device: str) -> Attend:
    """Build FlashAttention 4. It takes queries, keys and values separately; one copy joins their gradients."""
    kernel = installed("flash_attn.cute").flash_attn_func
    return _packed(lambda packed, causal: kernel(*packed.unbind(2), causal=causal), shape)


def _packed(kernel: Callable[..., Tensor | tuple[Tensor, ...]], shape: Shape) -> Attend:
    """Build attention from a kernel over [batch, tokens, 3, n_head, head_size].

    Some versions of the kernel also return the softmax's sums.
    """
    if shape.heads.n_kv_head != shape.n_head:
        raise Unavailable("refused", "called with packed tensors, it has as many key-value heads as heads")

    def attend(packed: Tensor) -> Tensor:
        y = kernel(packed.unflatten(2, (3, shape.n_head, shape.head_size)), causal=True)
        return (y[0] if isinstance(y, tuple) else y).flatten(2)

    return attend


# The builder of each, and the distributions that tell its version. Kernels that compile themselves come last.
KERNELS: dict[str, tuple] = {
    "standard": (_standard, "torch"),
    "SDPA FLASH_ATTENTION": (_sdpa("FLASH_ATTENTION"), "torch"),
    "SDPA EFFICIENT_ATTENTION": (_sdpa("EFFICIENT_ATTENTION"), "torch"),
    "SDPA CUDNN_ATTENTION": (_sdpa("CUDNN_ATTENTION"), "torch"),
    "Transformer Engine": (_transformer_engine, "transformer_engine", "transformer-engine"),
    "FlashAttention 2": (_flash_2, "flash-attn"),
    "FlashAttention 3": (_flash_3, "flash-attn-3", "flash_attn_3"),
    "FlashAttention 4": (_flash_4, "flash-attn-4"),
}


if __name__ == "__main__":
    timing.program(rows)

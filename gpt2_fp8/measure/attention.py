"""Causal attention by every kernel that is installed: `python -m gpt2_fp8.measure.attention OUT < REQUEST`.

**Each row starts from one packed bf16 tensor [batch, tokens, 3 n_embd], as a model's QKV product leaves it, and ends in
that tensor's packed gradient**: what splitting and copying a kernel needs is in its figure. Tables of kernels alone
leave that out, and show more. Each kernel gets the cheapest way in that it offers.

FLOPs are 4 batch n_head tokens^2 head_size / 2 forward (half of the matrix is masked, and not counted) and 3.5 times
that with backward. "forward" keeps what backward needs. "error" is how far the first sequence's result and gradient are
from float32, relative, in L2: a kernel that computes something else shows there. "times_standard" is the speed of
forward and backward over that of materialised softmax. Memory is the peak of allocated GiB, the packed tensor and its
gradient included.

REQUEST: {"models": [ModelConfig, ...], "micro_batch_size": B}. On a GPU the first model's heads are also measured at 8
sequences of 2,048 tokens, a shape that published tables use; on a CPU shapes are small.
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
BACKWARD = 2.5  # its FLOPs over those of forward: five products, one of them recomputed, against two
PUBLISHED = (8, 2048)
ON_CPU = (1, 64)  # at most


class Shape(NamedTuple):
    """What attention is computed over."""

    batch: int
    tokens: int
    n_head: int
    head_size: int

    @property
    def n_embd(self) -> int:
        """The width of queries, of keys and of values."""
        return self.n_head * self.head_size

    @property
    def heads(self) -> Heads:
        """The same for a layer."""
        return Heads(self.n_head, self.n_head, self.head_size)


Attend = Callable[[Tensor], Tensor]  # packed [batch, tokens, 3 n_embd] -> [batch, tokens, n_embd]


def rows(request: Row) -> Iterator[Row]:
    """A row for each shape and kernel."""
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
    return model.name, Shape(batch, model.n_positions, heads.n_head, heads.size)


def forward_flops(shape: Shape) -> float:
    """Of both products, over the half of the matrix that is not masked."""
    return 4 * shape.batch * shape.n_head * shape.tokens**2 * shape.head_size / 2


def measure(build: Callable[[Shape, str], Attend], shape: Shape, device: str) -> Row:
    """A kernel's figures on random queries, keys and values."""
    attend = build(shape, device)
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": device}
    packed = torch.randn(shape.batch, shape.tokens, 3 * shape.n_embd, **options).requires_grad_()  # type: ignore[call-overload]
    upstream = torch.randn(shape.batch, shape.tokens, shape.n_embd, **options)  # type: ignore[call-overload]

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
    """The larger of the errors of result and gradient, on the first sequence. `attend` gets the whole batch: a kernel
    may be chosen by it."""
    exact = packed[:1].detach().float().requires_grad_()
    y = materialised(shape, device)(exact)
    (gradient,) = torch.autograd.grad(y, exact, upstream[:1].float())
    mine = attend(packed)
    (my_gradient,) = torch.autograd.grad(mine, packed, upstream)
    pairs = ((mine, y), (my_gradient, gradient))
    return max(((a[:1].detach().float() - b.detach()).norm() / b.norm()).item() for a, b in pairs)


def materialised(shape: Shape, device: str) -> Attend:
    """Softmax over a matrix of scores that lies in memory: attention as it was before there were kernels for it."""
    masked = torch.ones(shape.tokens, shape.tokens, dtype=torch.bool, device=device).triu(1)

    def attend(packed: Tensor) -> Tensor:
        parts = packed.split(shape.n_embd, dim=2)
        q, k, v = (part.unflatten(2, (shape.n_head, shape.head_size)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(2, 3) / math.sqrt(shape.head_size)
        return (scores.masked_fill(masked, -math.inf).softmax(dim=3) @ v).transpose(1, 2).flatten(2)

    return attend


def _standard(shape: Shape, device: str) -> Attend:
    if device == "cuda":
        needed = 5 * 2 * shape.batch * shape.n_head * shape.tokens**2  # bytes of the matrices alive at once in backward
        free = torch.cuda.mem_get_info()[0]
        if needed > free:
            text = f"its matrices need about {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} are free"
            raise Unavailable("skipped", text)
    return materialised(shape, device)


def _sdpa(backend: str) -> Callable[[Shape, str], Attend]:
    """The model's own layer in plain torch, held to one of torch's kernels."""

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
    """The model's own layer: bshd, split by SplitAlongDim, whose backward does not copy."""
    installed("transformer_engine.pytorch")
    return te.attention(shape.heads, dropout=0.0)


def _flash_2(shape: Shape, device: str) -> Attend:
    return _packed(installed("flash_attn.flash_attn_interface").flash_attn_qkvpacked_func, shape)


def _flash_3(shape: Shape, device: str) -> Attend:
    return _packed(installed("flash_attn_interface").flash_attn_qkvpacked_func, shape)


def _flash_4(shape: Shape, device: str) -> Attend:
    """It takes queries, keys and values apart; their gradients are put together again by one copy."""
    kernel = installed("flash_attn.cute").flash_attn_func
    return _packed(lambda packed, causal: kernel(*packed.unbind(2), causal=causal), shape)


def _packed(kernel: Callable[..., Tensor | tuple[Tensor, ...]], shape: Shape) -> Attend:
    """A kernel over [batch, tokens, 3, n_head, head_size]; some versions return the softmax's sums along."""

    def attend(packed: Tensor) -> Tensor:
        y = kernel(packed.unflatten(2, (3, shape.n_head, shape.head_size)), causal=True)
        return (y[0] if isinstance(y, tuple) else y).flatten(2)

    return attend


# What builds each, and the distributions whose version it has. Those that compile themselves at first use come last.
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

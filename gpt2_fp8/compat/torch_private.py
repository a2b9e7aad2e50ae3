"""Parts of torch without a public name, each for what the public one costs. Holds for `torch>=2.11,<2.14`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer


def copy_all(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    """Copy each tensor of `of` into its fellow in `to`: a launch or two for hundreds of tensors, not one each."""
    torch._foreach_copy_(list(to), list(of))


def divide_all(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide each tensor in place, likewise."""
    torch._foreach_div_(list(tensors), divisor)


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# The address of a device's current stream, without a Stream object around it, which costs more than a launch. Triton
# and Inductor take it from here too. A torch without CUDA does not have it.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)


def default_store() -> Any:
    """Return the store through which the ranks have met. torch gives it to nobody, and a second one needs a port."""
    return distributed.distributed_c10d._get_default_store()


def start_compile_workers() -> None:
    """Start the processes in which Inductor compiles. By itself it does so in the midst of the first compilation.

    Raises whatever a torch of another version raises, where they are started in another way.
    """
    from torch._inductor.async_compile import AsyncCompile  # its import may start them

    AsyncCompile.warm_pool()


def skip_where(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Have a fused optimizer leave its next steps out where `found_inf`, float32 with one element on its device, is 1.

    It is the protocol between `torch.amp.GradScaler` and the fused optimizers. The scaler would also scale the loss.
    """
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def scheduler_counts(step: int, rates: Sequence[float | Tensor]) -> dict[str, Any]:
    """Return what a `LambdaLR` saves of where it stands: after `step` optimizer steps, at these learning rates."""
    return {"last_epoch": step, "_step_count": step + 1, "_last_lr": list(rates)}


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute causal attention by cuDNN, without a gradient.

    q, k, v: [batch, heads, tokens, head size], bfloat16 on CUDA. Returns a tensor like q, and of each row the natural
    logarithm of its sum of exponentials, float32 [batch, heads, tokens, 1]. The public `scaled_dot_product_attention`
    keeps the latter to itself, and another kernel's backward needs it.
    """
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, compute_log_sumexp=True, dropout_p=0.0, is_causal=True
    )
    return out, lse


def fp8_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast: bool) -> Tensor:
    """Multiply a [M, K] with b [K, N], float8 on CUDA, by torch's own cuBLASLt call; returns [M, N] bfloat16.

    Scales are float32 with one element. `fast` sums in the tensor cores alone. torch 2.11 has no public name for it.
    """
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)

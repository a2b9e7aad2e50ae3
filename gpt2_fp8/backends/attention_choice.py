"""Whether a run's layers can take the kernel of attention that was asked for, and what is nearest if they cannot."""

from __future__ import annotations

from gpt2_fp8.backends.base import Backend
from gpt2_fp8.config.backend_support import ON_A_GPU
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import AttentionKernel

NEAREST: tuple[AttentionKernel, ...] = ("flash", "cudnn", "te", "sdpa")  # the fastest first


def check(backend: Backend) -> None:
    """Raise UserError if the backend's layers cannot take `attention`. It allocates at most one sequence's heads."""
    kernel = backend.config.attention
    if (reason := why_not(backend, kernel)) is None:
        return
    nearest = next(other for other in NEAREST if other != kernel and why_not(backend, other) is None)
    raise UserError.of(f"attention={kernel} cannot run here: {reason}", f"attention={nearest}, or leave attention out")


def why_not(backend: Backend, kernel: AttentionKernel) -> str | None:
    """Return why a backend's layers cannot take a kernel; None if they can."""
    if kernel in ON_A_GPU and backend.device != "cuda":
        return "its kernels are a GPU's, and this run is on the CPU"
    if kernel in ON_A_GPU and backend.ran == "fp32":
        return "its kernels take bfloat16, and this run is in fp32"
    return None if kernel == "auto" else backend.why_not_attention(kernel)

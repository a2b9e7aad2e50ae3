"""Which kernel of attention a run can ask for, as far as the settings tell.

What only the machine can tell is asked when the backend is known (`backends/attention_choice.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.schema import AttentionKernel, RunConfig

ON_A_GPU: tuple[AttentionKernel, ...] = ("cudnn", "flash", "te")


def has_plain_layers(config: RunConfig) -> bool:
    """Return whether a run is sure to have plain-torch layers, or FP8 layers that are made of them."""
    if config.precision.name in ("fp32", "bf16"):
        return config.precision.backend in ("auto", "reference")
    return config.precision.backend in ("torchao", "emulated")


def check(config: RunConfig) -> Iterator[Finding]:
    """Find a kernel that no machine can take for this run."""
    if found := _why_not(config):
        keys, reason = found
        yield Finding(("attention", keys), Problem(f"attention={config.attention}: {reason}"))


def _why_not(config: RunConfig) -> tuple[str, str] | None:
    """Return the other key and the reason; None if nothing speaks against the kernel."""
    kernel, precision = config.attention, config.precision
    if kernel not in ON_A_GPU:
        return None
    if config.document_mask:
        return "document_mask", "it takes no mask, and this is document_mask=true"
    if config.trainer.accelerator == "cpu":
        return "trainer.accelerator", "its kernels are a GPU's, and this is trainer.accelerator=cpu"
    if precision.name == "fp32":
        return "precision", "its kernels take bfloat16, and this is precision=fp32"
    if kernel == "te" and has_plain_layers(config):
        return "precision.backend", "only the FP8 layers and precision.backend=te have it"
    if kernel == "cudnn" and config.trainer.deterministic:
        return "trainer.deterministic", "torch's cuDNN kernel is not deterministic"
    return None

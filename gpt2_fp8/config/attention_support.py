"""Which kernel of attention a run can ask for, as far as the settings tell.

What only the machine can tell is asked when the backend is known (`backends/attention_choice.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.schema import AttentionKernel, AutoPrecisionConfig, RunConfig

ON_A_GPU: tuple[AttentionKernel, ...] = ("cudnn", "flash", "te")


def has_plain_layers(config: RunConfig) -> bool:
    """Return whether a run is sure to have plain-torch layers, or FP8 layers that are made of them."""
    if isinstance(config.precision, AutoPrecisionConfig):
        return False
    if config.precision.name in ("fp32", "bf16"):
        return config.precision.backend in ("auto", "reference")
    return config.precision.backend in ("torchao", "emulated")


def check(config: RunConfig) -> Iterator[Finding]:
    """Find a kernel that no machine can take for this run."""
    if found := _why_not(config):
        keys, reason, remedy = found
        cause = f"attention={config.attention}: {reason}"
        yield Finding(("attention", *keys.split()), Problem(cause, remedy))


def _why_not(config: RunConfig) -> tuple[str, str, str] | None:
    """Return the other keys, the reason and the remedy; None if nothing speaks against the kernel."""
    kernel, precision = config.attention, config.precision
    if kernel not in ON_A_GPU:
        return None
    if config.document_mask:
        return (
            "document_mask",
            "it takes no mask, and this is document_mask=true",
            "attention=sdpa, or leave attention out",
        )
    if config.trainer.accelerator == "cpu":
        return "trainer.accelerator", "its kernels are a GPU's, and this is trainer.accelerator=cpu", "attention=auto"
    if precision.name == "fp32":
        return "precision", "its kernels take bfloat16, and this is precision=fp32", "attention=sdpa, or precision=bf16"
    if kernel == "te" and has_plain_layers(config):
        reason = "only the FP8 layers and precision.backend=te have it, and this run has plain-torch layers"
        return "precision.backend", reason, "attention=cudnn, or leave attention out"
    if kernel in ("te", "flash") and isinstance(precision, AutoPrecisionConfig):
        reason = "the layers that precision=auto compares do not all have it"
        return "precision", reason, "attention=cudnn, or a precision by name"
    if kernel == "cudnn" and config.trainer.deterministic:
        reason = "torch's cuDNN kernel is not deterministic, and this is trainer.deterministic=true"
        return "trainer.deterministic", reason, "attention=auto, or leave trainer.deterministic=true out"
    return None

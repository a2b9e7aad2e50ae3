"""Which kernel of attention a run can ask for, as far as the settings tell.

What only the machine can tell is asked when the backend is known (`backends/attention_choice.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpt2_fp8.config import backend_support
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.model_fits import cudnn_takes
from gpt2_fp8.config.schema import AttentionKernel, RunConfig

ON_A_GPU: tuple[AttentionKernel, ...] = ("cudnn", "flash", "te")


def _has_cudnns_heads(config: RunConfig) -> bool:
    return cudnn_takes(config.model.head_size or config.model.n_embd // config.model.n_head)


def has_plain_layers(config: RunConfig) -> bool:
    """Return whether a run is sure to have plain-torch layers, or FP8 layers that are made of them."""
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
    cudnn = not config.trainer.deterministic and _has_cudnns_heads(config)  # cuDNN's is not deterministic in torch
    held = "cudnn" if cudnn else "sdpa"
    if precision.name == "fp32":
        in_bf16 = ", or precision=bf16" if kernel == "flash" or kernel == held else ""
        return "precision", "its kernels take bfloat16, and this is precision=fp32", f"attention=sdpa{in_bf16}"
    if kernel == "te" and has_plain_layers(config):
        plain = "this run has plain-torch layers, which call torch's attention alone"
        reason = f"only the FP8 layers and precision.backend=te have it; {plain}"
        same = f"attention={held}"
        if held == "cudnn":
            same += " (torch's call of cuDNN, which Transformer Engine calls too)"
        others = ", or precision.backend=te" if _may_have_te(config) else ""
        return "precision.backend", reason, f"{same}{others}, or leave attention out"
    if kernel == "cudnn" and config.trainer.deterministic:
        reason = "torch's cuDNN kernel is not deterministic, and this is trainer.deterministic=true"
        return "trainer.deterministic", reason, "attention=auto, or leave trainer.deterministic=true out"
    return None


def _may_have_te(config: RunConfig) -> bool:
    """Return whether Transformer Engine's layers have everything that a run of plain layers asks for."""
    changed = replace(config, precision=replace(config.precision, backend="te"))
    return backend_support.why_not_asked(changed) is None and not any(backend_support.options(changed))

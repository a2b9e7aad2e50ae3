"""Can this machine train in FP8, and if not, why? Every answer is one sentence for the user."""

from __future__ import annotations

import importlib.util

import torch

from gpt2_fp8.compat import torchao
from gpt2_fp8.config.backend_support import FP8_CAPABILITY, HOPPER, ROWWISE_CAPABILITY
from gpt2_fp8.config.shown import one_line


def why_no_fp8_units() -> str | None:
    """Return why the GPU has no FP8 matrix units, whatever computes with them; None if it has."""
    return _why_no_cuda() or _too_old("FP8", FP8_CAPABILITY)


def why_not_te_fp8() -> str | None:
    """Return why this machine cannot train in FP8 with Transformer Engine, on which the fused layers also stand.

    Transformer Engine is imported only if the GPU could use it.
    """
    if reason := why_no_fp8_units() or why_no_transformer_engine():
        return reason
    try:
        import transformer_engine.pytorch as te

        available, reason = te.is_fp8_available(return_reason=True)
    except Exception as error:
        return _does_not_load(error)
    return None if available else one_line(reason)


def why_no_torchao() -> str | None:
    """Return why torchao's FP8 cannot run here; None if it can. torchao is imported only if the GPU could use it."""
    return why_no_fp8_units() or torchao.why_not()


def _why_no_cuda() -> str | None:
    if torch.cuda.is_available():
        return None
    return "there is no CUDA GPU" if torch.version.cuda else "this torch was built without CUDA"


def _too_old(what: str, needed: tuple[int, int]) -> str | None:
    capability = torch.cuda.get_device_capability()
    if capability >= needed:
        return None
    have, need = (".".join(map(str, c)) for c in (capability, needed))
    return f"{torch.cuda.get_device_name()} has compute capability {have}, and {what} needs {need}"


def has_fp8_conversion() -> bool:
    """Return whether the CUDA GPU converts to FP8 in hardware, as compiled code does."""
    return torch.cuda.get_device_capability() >= FP8_CAPABILITY


def why_no_transformer_engine() -> str | None:
    """Return why Transformer Engine's layers cannot run here in any precision; None if they can."""
    if reason := _why_no_cuda():
        return reason
    if importlib.util.find_spec("transformer_engine") is None:
        return 'Transformer Engine is not installed (docs/fp8.md: pip install --no-build-isolation -e ".[fp8]")'
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:
        return _does_not_load(error)
    return None


def _does_not_load(error: Exception) -> str:
    """Describe a failed import. A broken build raises anything from OSError to RuntimeError; all mean the same."""
    return f"Transformer Engine does not load: {type(error).__name__}: {one_line(error)}"


def why_not_recipe(name: str) -> str | None:
    """Return why this machine, which can do FP8, cannot do a scaling recipe; None if it can."""
    if name == "rowwise":
        return why_no_torchao() or _too_old("recipe=rowwise", ROWWISE_CAPABILITY)
    if name in ("auto", "current"):
        return None
    if reason := why_not_te_fp8():
        return reason
    import transformer_engine.pytorch as te

    probes = {"block": te.is_fp8_block_scaling_available, "mxfp8": te.is_mxfp8_available}
    if name not in probes:
        return None
    available, reason = probes[name](return_reason=True)
    return None if available else one_line(reason)


def why_no_hopper() -> str | None:
    """Return why kernels made for Hopper cannot run on this GPU; None if they can."""
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return f"their kernels are made for Hopper, and this is {torch.cuda.get_device_name()}"
    return None

"""Can this machine train in FP8, and if not, why? Every answer is one sentence for the person who asked."""

from __future__ import annotations

import importlib.util

import torch

from gpt2_fp8.config import fused_support
from gpt2_fp8.config.schema import RunConfig

NEEDED = (8, 9)  # Ada
HOPPER = 9


def why_not_fp8() -> str | None:
    """The reason this machine cannot train in FP8, or None if it can. Imports Transformer Engine only on a GPU that
    could use it."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU" if torch.version.cuda else "this torch was built without CUDA"
    capability = torch.cuda.get_device_capability()
    if capability < NEEDED:
        have, need = (".".join(map(str, c)) for c in (capability, NEEDED))
        return f"{torch.cuda.get_device_name()} has compute capability {have}, and FP8 needs {need}"
    if importlib.util.find_spec("transformer_engine") is None:
        return 'Transformer Engine is not installed (README, "FP8": pip install --no-build-isolation -e ".[fp8]")'
    try:
        import transformer_engine.pytorch as te

        available, reason = te.is_fp8_available(return_reason=True)
    except Exception as error:  # a broken build raises anything from OSError to RuntimeError; all mean the same here
        return f"Transformer Engine does not load: {type(error).__name__}: {first_line(error)}"
    return None if available else first_line(reason)


def why_not_recipe(name: str) -> str | None:
    """The reason this machine cannot do a scaling recipe although it can do FP8, or None if it can."""
    import transformer_engine.pytorch as te

    probes = {"block": te.is_fp8_block_scaling_available, "mxfp8": te.is_mxfp8_available}
    if name not in probes:
        return None
    available, reason = probes[name](return_reason=True)
    return None if available else first_line(reason)


def why_not_fused(config: RunConfig) -> str | None:
    """The reason the fused layers cannot compute a run on this GPU, which can do FP8; None if they can."""
    if reason := fused_support.why_not(config):
        return reason
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return f"their kernels are made for Hopper, and this is {torch.cuda.get_device_name()}"
    return None


def first_line(reason: object) -> str:
    """An error's text, cut to what fits a line of a log."""
    text = " ".join(str(reason).split())
    return text[:197] + "..." if len(text) > 200 else text

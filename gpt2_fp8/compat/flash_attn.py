"""FlashAttention 4's backward without its forward, of which it has no public one. Holds for `flash-attn-4==4.0.0b36`.

The name `flash_attn` also belongs to FlashAttention 2, which has no module `cute`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

NOT_INSTALLED = "flash-attn-4 is not installed"


@cache
def flash_backward() -> Callable[..., Any] | None:
    """Return the backward; None if `why_no_flash` gives a reason.

    Its tensors are bfloat16 [batch, tokens, heads, head size], and lse, as of `cudnn_attention`, float32 [batch, heads,
    tokens].
    """
    return None if why_no_flash() else _import()


@cache
def why_no_flash() -> str | None:
    """Return why it cannot be called, or None. It may be missing or fail to load."""
    try:
        _import()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "flash_attn":  # not installed, or only FlashAttention 2
            return NOT_INSTALLED
        return f"flash-attn-4 does not load: {error}"
    except Exception as error:  # for example from a compiler of another version
        return f"flash-attn-4 does not load: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def _import() -> Callable[..., Any]:
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd

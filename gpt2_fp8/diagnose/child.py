"""The child process: imports torch and what FP8 stands on, and asks the backends what they can compute here.

It is `python -m gpt2_fp8.diagnose.child ANSWER < PARTS`: PARTS a list of names, both JSON. The answer is written again
after each part, so that a part which crashes leaves those before it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUNS = (
    *(("delayed", "fused"), ("delayed", "te"), ("current", "te"), ("block", "te"), ("mxfp8", "te")),
    *(("current", "torchao"), ("rowwise", "torchao")),
)


def torch() -> dict[str, Any]:
    """Return what torch says of itself and of the GPU."""
    import torch

    available, unavailable = torch.cuda.is_available(), None
    if torch.version.cuda and not available:
        try:
            torch.cuda.init()
        except Exception as error:
            unavailable = said(error)
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
    return {
        "torch_cuda": torch.version.cuda,
        "available": available,
        "unavailable": unavailable,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if available else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }


def transformer_engine() -> None:
    """Load Transformer Engine."""
    import transformer_engine.pytorch  # noqa: F401


def cudnn() -> dict[str, Any]:
    """Return the version of the cuDNN that is loaded, which may be another one than torch's own."""
    import torch

    from gpt2_fp8.kernels import dotted

    try:
        number = torch.backends.cudnn.version()
    except Exception as error:
        return {"cudnn_error": said(error)}
    return {"cudnn": dotted(number) if number else None}


def torchao() -> str | None:
    """Return why torchao cannot be used; None if it can."""
    from gpt2_fp8.compat import torchao

    return torchao.why_not()


def flash_attn() -> str | None:
    """Return why FlashAttention 4's backward cannot be used; None if it can."""
    from gpt2_fp8.compat import flash_attn

    return flash_attn.why_no_flash()


def runs() -> dict[str, str | None]:
    """Return why a run in FP8 with each recipe and backend cannot run here; None if it can."""
    from gpt2_fp8 import compose
    from gpt2_fp8.config.errors import UserError
    from gpt2_fp8.fp8.resolve import resolve
    from gpt2_fp8.runtime import devices

    found: dict[str, str | None] = {}
    for recipe, backend in RUNS:
        words = ["model=gpt2", "precision=fp8_hybrid", f"precision.backend={backend}", f"recipe={recipe}"]
        (config,) = compose.preflight([*words, "precision.fallback=error"])
        try:
            found[f"{recipe} {backend}"] = resolve(config, devices.device(config)).reason
        except UserError as error:
            found[f"{recipe} {backend}"] = error.problems[0].cause
    return found


def said(error: BaseException) -> str:
    """Return an error as one line, whole: the cause of an import that fails is often at its end."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:2000]


ANSWERS: dict[str, Callable[[], Any]] = {
    "torch": torch, "transformer-engine": transformer_engine, "cudnn": cudnn, "torchao": torchao,
    "flash-attn-4": flash_attn, "runs": runs,
}  # fmt: skip


def main(parts: list[str], answer: Path) -> None:
    """Answer each part in turn; one that raises is answered with the error."""
    done: dict[str, dict[str, Any]] = {}
    for part in parts:
        try:
            done[part] = {"answer": ANSWERS[part]()}
        except Exception as error:  # a broken build raises anything from OSError to RuntimeError
            done[part] = {"error": said(error)}
        answer.write_text(json.dumps(done))


if __name__ == "__main__":
    main(json.load(sys.stdin), Path(sys.argv[1]))

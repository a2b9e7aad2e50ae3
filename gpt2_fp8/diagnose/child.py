"""The child process: imports torch and what FP8 stands on, and asks the backends what they can compute here.

It is `python -m gpt2_fp8.diagnose.child ANSWER < REQUEST`; both are JSON, ANSWER is a path. The answer is written again
after each part, so a part that crashes leaves those before it. The request: `parts`, their names in order; `runs`, the
configurations by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpt2_fp8.config import parsing
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.diagnose.facts import Torch

MAPPED = Path("/proc/self/maps")


def said(error: BaseException) -> str:
    """Return an error as one line, whole: the cause of an import that fails is often at its end."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:2000]


def torch() -> dict[str, Any]:
    """Return the fields of `facts.Torch`."""
    try:
        import torch
    except Exception as error:  # a broken build raises anything from OSError to RuntimeError
        return asdict(no_torch(said(error)))
    available, unavailable = torch.cuda.is_available(), None
    if torch.version.cuda and not available:
        try:
            torch.cuda.init()
        except Exception as error:
            unavailable = said(error)
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
    return asdict(
        Torch(
            error=None,
            version=torch.__version__,
            cuda=torch.version.cuda,
            available=available,
            unavailable=unavailable,
            gpu=torch.cuda.get_device_name() if available else None,
            capability=".".join(map(str, torch.cuda.get_device_capability())) if available else None,
            architectures=torch.cuda.get_arch_list(),
            nccl=".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl and str(nccl),
        )
    )


def no_torch(error: str) -> Torch:
    """Return what is known of a torch that does not import."""
    return Torch(
        error=error,
        version=None,
        cuda=None,
        available=False,
        unavailable=None,
        gpu=None,
        capability=None,
        architectures=[],
        nccl=None,
    )


def transformer_engine() -> str | None:
    """Return why Transformer Engine does not load, the error's whole text; None if it does."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:
        return said(error)
    return None


def cudnn() -> dict[str, Any]:
    """Return what torch says of the cuDNN that is loaded, and the files of it in this process.

    It comes after Transformer Engine, since that may have loaded another one than torch would.
    """
    import torch

    from gpt2_fp8.kernels.libraries import dotted

    error = version = None
    try:
        number = torch.backends.cudnn.version()
        version = dotted(number) if number else None
    except Exception as caught:
        error = said(caught)
    return {"error": error, "version": version, "loaded": _mapped("libcudnn.so")}


def _mapped(name: str) -> list[str]:
    """Return the files of this process' memory whose names begin with `name`, each once."""
    try:
        lines = MAPPED.read_text().splitlines()
    except OSError:  # not Linux
        return []
    paths = [line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6]
    return list(dict.fromkeys(path for path in paths if Path(path).name.startswith(name)))


def torchao() -> str | None:
    """Return why torchao cannot be used; None if it can."""
    from gpt2_fp8.compat import torchao

    return torchao.why_not()


def flash_attn() -> str | None:
    """Return why FlashAttention 4's backward cannot be used; None if it can."""
    from gpt2_fp8.compat import flash_attn

    return flash_attn.why_no_flash()


def cuda_core() -> str | None:
    """Return why the kernels in CUDA C++ cannot be compiled; None if they can."""
    from gpt2_fp8.kernels import nvrtc

    return nvrtc.missing()


def runs(configs: dict[str, Any]) -> dict[str, str | None]:
    """Return for each configuration why a run of it does not do what it asks for; None if it does."""
    return {name: _why_not(config) for name, config in configs.items()}


def _why_not(data: Any) -> str | None:
    from gpt2_fp8.backends.resolve import resolve
    from gpt2_fp8.runtime import devices

    config, found = parsing.build(RunConfig, data)
    assert config is not None, found
    try:
        plan = resolve(config, devices.device(config))
    except UserError as error:
        return error.problems[0].cause
    except Exception as error:
        return said(error)
    return plan.reason


PARTS: dict[str, Callable[[], Any]] = {
    "torch": torch,
    "transformer_engine": transformer_engine,
    "cudnn": cudnn,
    "torchao": torchao,
    "flash_attn": flash_attn,
    "cuda_core": cuda_core,
}


def main(request: dict[str, Any], answer: Path) -> None:
    """Answer each part in turn; a part that raises is answered with the error, as {"failed": TEXT}."""
    done: dict[str, Any] = {}
    for part in request["parts"]:
        try:
            done[part] = runs(request["runs"]) if part == "runs" else PARTS[part]()
        except Exception as error:
            done[part] = {"failed": said(error)}
        partial = answer.with_name(f"{answer.name}.part")
        partial.write_text(json.dumps(done))
        partial.replace(answer)


if __name__ == "__main__":
    main(json.load(sys.stdin), Path(sys.argv[1]))

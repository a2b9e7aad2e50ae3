"""The facts of this machine: of the host, of torch and what FP8 stands on, and times of a training step.

What takes torch is asked in a child process, `python -m gpt2_fp8.measure.machine ANSWER < PARTS`: PARTS a list of
names, both JSON. It writes the answer again after each part, so that a part which crashes leaves those before it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2_fp8 import __version__, compose
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.shown import one_line
from gpt2_fp8.measure.case import Case, measure, run_child
from gpt2_fp8.runtime import programs

SECONDS = 180.0  # for all parts of the child: imports from a network's disk take long
STEP_SECONDS = 150.0  # for the steps of one precision, with compilation
WARMUP, STEPS = 5, 10
# GPT-2 124M with its own vocabulary, on text that every machine has; 16 sequences fit into 16 GB
MEASURED = ("model=gpt2", "data=stdlib", "model.vocab_size=50257", "micro_batch_size=16", "global_batch_size=16")
PACKAGES = ("torch", "transformer-engine", "torchao", "flash-attn-4")
_VARIABLES = re.compile(r"(NVTE|CUDNN|NCCL)_\w+|CUDA_(VISIBLE_DEVICES|HOME|PATH|LAUNCH_BLOCKING)|LD_LIBRARY_PATH")

# in FP8: "RECIPE BACKEND"
RUNS = ("delayed fused", "delayed te", "current te", "block te", "mxfp8 te", "current torchao", "rowwise torchao")


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A folder that a run writes to; if it is not there yet, the nearest that is."""

    path: str
    free: int  # bytes
    writable: bool


@dataclass(frozen=True)
class Step:
    """A measured training step, or why there is no time."""

    backend: str | None = None
    tokens_per_second: float | None = None
    milliseconds: float | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is known of a machine. None: the machine does not say."""

    gpt2_fp8: str
    platform: str
    machine: str  # x86_64, aarch64
    python: str
    container: bool
    driver: str | None
    driver_cuda: str | None  # the newest CUDA that it can run
    driver_error: str | None  # why nvidia-smi gave no answer
    on_bus: bool  # whether an NVIDIA GPU is on the PCI bus, with or without a driver
    gpus: list[tuple[str, str]]  # names and compute capabilities, as the driver says
    tools: dict[str, str | None]  # paths of compilers and headers
    libraries: dict[str, str | None]  # packages and their versions; None: not installed
    disks: dict[str, Disk]
    environment: dict[str, str]  # the variables that change what computes
    # of a child process that imports torch
    torch_cuda: str | None = None  # that it was built with
    available: bool = False  # whether torch can use a GPU
    unavailable: str | None = None  # why not, in CUDA's words
    capability: str | None = None  # of the GPU that a run takes
    nccl: str | None = None
    cudnn: str | None = None
    cudnn_error: str | None = None
    runs: dict[str, str | None] = field(default_factory=dict)  # "RECIPE BACKEND": why FP8 cannot run so; None: it can
    errors: dict[str, str] = field(default_factory=dict)  # by package or part of the child: why it cannot be used
    steps: dict[str, Step] = field(default_factory=dict)  # by precision


def collect(say: Callable[[str], None]) -> Facts:
    """Return the facts of this machine, without times of steps. `say` is told what is looked at."""
    say("the host and its GPUs")
    host, versions = _host(), {name: programs.installed_version(name) for name in PACKAGES}
    say("torch, Transformer Engine and what else FP8 stands on, in a process of their own")
    answers, errors = ask([part for part in ANSWERS if versions.get(part, "") is not None])
    errors |= {name: answers[name] for name in PACKAGES if isinstance(answers.get(name), str)}
    known = {**answers.get("torch", {}), **answers.get("cudnn", {}), "runs": answers.get("runs", {})}
    return Facts(**host, **known, libraries=versions, errors=errors)


def ask(parts: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the answers of the child's parts, and why others have none. After a crash a new child has the rest."""
    answers: dict[str, Any] = {}
    failed: dict[str, str] = {}
    while parts and "torch" not in failed:  # all others import it too
        ended = run_child(__name__, parts, SECONDS)
        done = ended.answer or {}
        answers |= {part: told["answer"] for part, told in done.items() if "answer" in told}
        failed |= {part: told["error"] for part, told in done.items() if "error" in told}
        parts = [part for part in parts if part not in done]
        if parts:
            failed[parts[0]] = ended.message or "its process ended in the middle of it"
            parts = parts[1:]
    return answers, failed


def measure_steps(say: Callable[[str], None]) -> dict[str, Step]:
    """Measure training steps in FP8 and in bf16, each in a process of its own."""
    found = {}
    for precision, words in (("fp8_hybrid", ["precision.fallback=error"]), ("bf16", ["compile=true"])):
        say(f"a training step of GPT-2 124M in {precision}: {WARMUP} + {STEPS} steps")
        (config,) = compose.preflight([*MEASURED, "trainer=gpu", f"precision={precision}", *words])
        result = measure(Case(config=config, steps=STEPS, warmup=WARMUP), STEP_SECONDS)
        if (rate := result.tokens_per_second) is None:
            found[precision] = Step(result.backend, problem=f"{result.status}: {result.message}")
        else:
            found[precision] = Step(result.backend, rate, 1e3 * tokens_a_step(config) / rate)
    return found


def _host() -> dict[str, Any]:
    fields = "--query-gpu=name,compute_cap,driver_version"
    listed, error = _output("nvidia-smi", fields, "--format=csv,noheader,nounits")
    rows = [line.split(", ") for line in listed.splitlines() if line.count(", ") == 2] if error is None else []
    header = Path(sysconfig.get_path("include")) / "Python.h"
    newest = re.search(r"CUDA(?: UMD)? Version:\s*([\d.]+)", _output("nvidia-smi")[0] if rows else "")
    return {
        "gpt2_fp8": __version__,
        "platform": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "container": any(Path(name).exists() for name in ("/.dockerenv", "/run/.containerenv", "/.singularity.d")),
        "driver": rows[0][2].strip() if rows else None,
        "driver_cuda": newest[1] if newest else None,
        "driver_error": error,
        "on_bus": _on_bus(),
        "gpus": [(name, capability) for name, capability, _ in rows],
        "tools": {  # that compile Triton's kernels and Transformer Engine
            "cc": shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"),
            "c++": shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"),
            "Python.h": str(header) if header.is_file() else None,
        },
        "disks": dict(_disks()),
        "environment": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
    }


def _output(*command: str) -> tuple[str, str | None]:
    """Return what a command prints, and why it failed in one line; None if it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, stdin=-3)
    except FileNotFoundError:
        return "", f"{command[0]} is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        return "", one_line(error)
    failed = one_line(done.stderr or done.stdout, 300) or f"exit code {done.returncode}"
    return done.stdout, failed if done.returncode else None


def _on_bus() -> bool:
    with suppress(OSError):
        for device in Path("/sys/bus/pci/devices").glob("*"):
            if (device / "vendor").read_text() == "0x10de\n" and (device / "class").read_text().startswith("0x03"):
                return True
    return False


def _disks() -> Iterator[tuple[str, Disk]]:
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache")
    folders = {"outputs": Path("outputs"), "Triton's cache": cache, "the temporary folder": Path(tempfile.gettempdir())}
    for name, path in folders.items():
        there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        free, writable = shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK)
        yield name, Disk(path=str(path.absolute()), free=free, writable=writable)


# ---- the child process -----------------------------------------------------------------------------------------------


def ask_torch() -> dict[str, Any]:
    """Return what torch says of itself and of the GPU."""
    import torch

    available, unavailable = torch.cuda.is_available(), None
    if torch.version.cuda and not available:
        try:
            torch.cuda.init()
        except Exception as error:
            unavailable = _told(error)
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
    return {
        "torch_cuda": torch.version.cuda,
        "available": available,
        "unavailable": unavailable,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if available else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }


def load_transformer_engine() -> None:
    """Load it: an extension that was built for another torch raises here."""
    import transformer_engine.pytorch  # noqa: F401


def ask_cudnn() -> dict[str, Any]:
    """Return the version of the cuDNN that is loaded, which may be another one than torch's own."""
    import torch

    from gpt2_fp8.kernels import format_version

    try:
        number = torch.backends.cudnn.version()
    except Exception as error:
        return {"cudnn_error": _told(error)}
    return {"cudnn": format_version(number) if number else None}


def ask_torchao() -> str | None:
    """Return why torchao cannot be used; None if it can."""
    from gpt2_fp8.compat import torchao

    return torchao.why_not()


def ask_flash_attn() -> str | None:
    """Return why FlashAttention 4's backward cannot be used; None if it can."""
    from gpt2_fp8.compat import flash_attn

    return flash_attn.why_no_flash()


def ask_backends() -> dict[str, str | None]:
    """Return why a run in FP8 with each recipe and backend cannot run here; None if it can."""
    from gpt2_fp8.fp8.resolve import resolve
    from gpt2_fp8.runtime import devices

    found: dict[str, str | None] = {}
    for run in RUNS:
        recipe, backend = run.split()
        words = ["model=gpt2", "precision=fp8_hybrid", f"precision.backend={backend}", f"recipe={recipe}"]
        (config,) = compose.preflight([*words, "precision.fallback=error"])
        try:
            found[run] = resolve(config, devices.device(config)).reason
        except UserError as error:
            found[run] = error.problems[0].cause
    return found


ANSWERS: dict[str, Callable[[], Any]] = {
    "torch": ask_torch, "transformer-engine": load_transformer_engine, "cudnn": ask_cudnn, "torchao": ask_torchao,
    "flash-attn-4": ask_flash_attn, "runs": ask_backends,
}  # fmt: skip


def _told(error: Exception) -> str:
    """Return an error as one line, whole: the cause of an import that fails is often at its end."""
    return one_line(f"{type(error).__name__}: {error}", 2000)


def answer_parts(parts: list[str], answer: Path) -> None:
    """Answer each part in turn; one that raises is answered with the error."""
    done: dict[str, dict[str, Any]] = {}
    for part in parts:
        try:
            done[part] = {"answer": ANSWERS[part]()}
        except Exception as error:  # a broken build raises anything from OSError to RuntimeError
            done[part] = {"error": _told(error)}
        answer.write_text(json.dumps(done))


if __name__ == "__main__":
    answer_parts(json.load(sys.stdin), Path(sys.argv[1]))

"""The environment check: whether FP8 works on this machine, how fast, and if not, which command mends it.

    python -m gpt2_fp8.doctor
    python -m gpt2_fp8.doctor --json > report.json

Rules say what the recorded facts mean, in the order in which a person would mend them, so that they can be tried on
machines that nobody here has.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from gpt2_fp8.config.backend_support import FP8_CAPABILITY, HOPPER, parse_version
from gpt2_fp8.config.shown import harmless
from gpt2_fp8.measure import machine
from gpt2_fp8.measure.machine import Facts
from gpt2_fp8.runtime import programs

NO_FP8 = 5  # the exit code if FP8 cannot run
_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
FORMAT = "gpt2_fp8 doctor 2"
LAYERS = {"fused": "the fused layers", "te": "Transformer Engine's layers", "torchao": "torchao"}
TORCH = 'pip install --force-reinstall "torch>=2.11,<2.14"'
PREPARE = 'pip install "setuptools>=77" wheel packaging ninja pybind11'
INSTALL = f'{PREPARE} && pip install --no-build-isolation -e ".[fp8]"'
ANEW = "pip install --no-build-isolation --no-cache-dir --no-deps --force-reinstall transformer-engine-torch=={}"
BUILD = "It is compiled against your torch, and takes a C++ compiler and the headers of CUDA and cuDNN."
ARM = (
    "Transformer Engine's build reads the version of CUDA from torch. On ARM64 torch had none on the package index up "
    "to 2.10, and the build ends in `expected string or bytes-like object, got 'NoneType'`. NVIDIA's container, on "
    "which the Dockerfile builds, has both; torchao (pip install torchao) has nothing to compile."
)
NO_DRIVER = "nvidia-smi is not installed"
GIB = 2**30
LEAST_DISK = {"outputs": 5 * GIB, "Triton's cache": GIB, "the temporary folder": GIB}


@programs.exit_code
def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    arguments = _parser().parse_args(argv)
    facts = machine.collect(_say)
    if not arguments.quick and verdict(facts, findings(facts))[0]:
        facts = replace(facts, steps=machine.measure_steps(_say))
    found = findings(facts)
    works, line, remedy = verdict(facts, found)
    if arguments.json:
        shown = {"format": FORMAT, "fp8_works": works, "verdict": line, "remedy": remedy}
        print(json.dumps(shown | {"findings": [asdict(one) for one in found], "facts": asdict(facts)}, indent=1))
    else:
        print(harmless("\n".join([line, "", *_describe_findings(found), "", *_describe_runs(facts)])))
    return 0 if works else NO_FP8


def _say(what: str) -> None:
    print(f"looking at {what} ...", file=sys.stderr, flush=True)


def _describe_findings(found: list[Finding]) -> Iterator[str]:
    """Yield the lines of findings, for 80 columns. A command is never broken, so that it can be copied."""
    for one in found:
        text = f"{_MARKS[one.status]} {one.subject}: {one.what}{'. ' if one.why else ''}{one.why or ''}"
        yield from textwrap.wrap(text, 80, subsequent_indent="     ", break_long_words=False)
        if one.remedy:
            yield f"     fix: {one.remedy}"


def _describe_runs(facts: Facts) -> Iterator[str]:
    """Yield which recipes run on which layers with precision=fp8_hybrid."""
    for backend, layers in LAYERS.items():
        own = {name.partition(" ")[0]: why for name, why in facts.runs.items() if name.endswith(f" {backend}")}
        yes, reasons = [name for name, why in own.items() if why is None], dict.fromkeys(filter(None, own.values()))
        yield f"{layers} ({backend}): {', '.join(yes) or 'no recipe'}{''.join(f'; {why}' for why in reasons)}"


def _parser() -> argparse.ArgumentParser:
    parser = programs.parser(
        "doctor", "Says whether FP8 works on this machine, how fast a step is, and if not, which command mends it.",
        f"{NO_FP8} FP8 cannot run here; ",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object: facts, findings, verdict")
    parser.add_argument("--quick", action="store_true", help="measure no step (otherwise about a minute on a GPU)")
    return parser


# ---- rules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What a rule says: "ok"; "warn": slower, or a trap; "fail": FP8, or what it needs, does not work."""

    subject: str
    status: str
    what: str
    why: str | None = None
    remedy: str | None = None  # a command


def findings(facts: Facts) -> list[Finding]:
    """Return what every rule says."""
    rules = (_gpu, _driver, _torch, _transformer_engine, _libraries, _compilers, _disks, _steps)
    host = Finding("machine", "ok", f"{facts.machine}, {facts.platform}, Python {facts.python}")
    return [host, *(finding for rule in rules for finding in rule(facts))]


def verdict(facts: Facts, found: list[Finding]) -> tuple[bool, str, str | None]:
    """Return whether FP8 works here, that in one line, and the command that mends it if not."""
    worst = next((one for one in found if one.status == "fail"), None)
    if worst is not None:
        return False, f"FP8 cannot run here: {worst.what}", worst.remedy
    if (layers := next((name for name in LAYERS if _works(facts, name)), None)) is None:
        reason = next(filter(None, facts.runs.values()), facts.errors.get("runs", "no backend was asked"))
        return False, f"FP8 cannot run here: {reason}", None
    times = [facts.steps[name].milliseconds for name in ("bf16", "fp8_hybrid") if name in facts.steps]
    ratio = f", {times[0] / times[1]:.2f} x bf16" if len(times) == 2 and times[0] and times[1] else ""
    return True, f"FP8 works here: {LAYERS[layers]}{ratio}", None


def _works(facts: Facts, backend: str) -> bool:
    return any(why is None for name, why in facts.runs.items() if name.endswith(f" {backend}"))


def _has_gpu(facts: Facts) -> bool:
    return bool(facts.gpus) or facts.available


def _units(facts: Facts) -> tuple[int, int] | None:
    return parse_version(facts.capability or (facts.gpus[0][1] if facts.gpus else None))


def _may_fp8(facts: Facts) -> bool:
    return _has_gpu(facts) and (_units(facts) or FP8_CAPABILITY) >= FP8_CAPABILITY


def _gpu(facts: Facts) -> Iterator[Finding]:
    if not _has_gpu(facts):
        what, remedy = "there is no NVIDIA GPU", "python -m gpt2_fp8.run precision.backend=emulated"
        if facts.on_bus and facts.container:
            what, remedy = "this container was not given the machine's GPU", "docker run --gpus all IMAGE"
        elif facts.on_bus and facts.driver_error == NO_DRIVER:
            what, remedy = "there is an NVIDIA GPU, and no driver for it", "sudo ubuntu-drivers install"
        elif facts.on_bus:
            what, remedy = f"nvidia-smi fails: {facts.driver_error}", "sudo reboot"
        yield Finding("GPU", "fail", what, None, remedy)
        return
    if facts.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Finding("GPU", "fail", "CUDA_VISIBLE_DEVICES hides every GPU", None, "unset CUDA_VISIBLE_DEVICES")
    for number, (name, capability) in enumerate(facts.gpus):
        yield Finding("GPU", "ok", f"{number}: {name}, compute capability {capability}")
    if not _may_fp8(facts):
        units = [parse_version(capability) for _, capability in facts.gpus]
        able = [number for number, has in enumerate(units) if has and has >= FP8_CAPABILITY]
        other = f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={able[0]}" if able else None
        what = f"the first GPU has compute capability {'.'.join(map(str, _units(facts) or ()))}, and FP8 needs 8.9"
        yield Finding("GPU", "fail", what, None, other or "python -m gpt2_fp8.run precision=bf16")


def _driver(facts: Facts) -> Iterator[Finding]:
    can, built = parse_version(facts.driver_cuda), parse_version(facts.torch_cuda)
    if not _has_gpu(facts):
        return
    if can and built and can[0] < built[0] and not facts.available:
        what = f"driver {facts.driver} runs CUDA up to {facts.driver_cuda}, and torch has CUDA {facts.torch_cuda}"
        older = f"{TORCH} --index-url https://download.pytorch.org/whl/cu128"
        yield Finding("driver", "fail", what, "Install a newer driver, or a torch for CUDA 12.", older)
    else:
        yield Finding("driver", "ok", f"{facts.driver}, for CUDA up to {facts.driver_cuda}")


def _torch(facts: Facts) -> Iterator[Finding]:
    version = facts.libraries.get("torch")
    if version is None:
        yield Finding("torch", "fail", "torch is not installed", None, "pip install -e .")
    elif "torch" in facts.errors:
        remedy = "unset LD_LIBRARY_PATH" if "LD_LIBRARY_PATH" in facts.environment else TORCH
        yield Finding("torch", "fail", "torch does not import", facts.errors["torch"], remedy)
    elif facts.torch_cuda is None and _has_gpu(facts):
        why = ARM if facts.machine == "aarch64" else BUILD
        yield Finding("torch", "fail", f"torch {version} has no CUDA, and there is a GPU", why, TORCH)
    elif facts.unavailable and _has_gpu(facts):
        fabric = "sudo systemctl start nvidia-fabricmanager" if "802" in facts.unavailable else "sudo reboot"
        yield Finding("torch", "fail", "CUDA does not start", facts.unavailable, fabric)
    else:
        cuda = f"CUDA {facts.torch_cuda}, NCCL {facts.nccl}" if facts.torch_cuda else "a build for CPUs"
        yield Finding("torch", "ok", f"{version}, {cuda}")
        if len(facts.gpus) > 1 and facts.available and not facts.nccl:
            yield Finding("NCCL", "warn", "this torch has no NCCL, which several GPUs need", None, TORCH)


def _transformer_engine(facts: Facts) -> Iterator[Finding]:
    version, error = facts.libraries.get("transformer-engine"), facts.errors.get("transformer-engine")
    name, status = "Transformer Engine", "warn" if _works(facts, "torchao") else "fail"
    if not _may_fp8(facts) or "torch" in facts.errors:
        return
    if version:
        remedy = "pip install -U nvidia-cublas" if "cublas" in (error or "").lower() else ANEW.format(version)
        broken = Finding(name, status, f"{name} {version} does not load", error, remedy)
        yield broken if error else Finding(name, "ok", version)
        return
    if not facts.tools.get("c++"):
        yield Finding(name, status, "there is no C++ compiler for it", None, "sudo apt-get install build-essential")
    why = ARM if facts.machine == "aarch64" and facts.torch_cuda else BUILD
    yield Finding(name, status, f"{name} is not installed", why, INSTALL)


def _libraries(facts: Facts) -> Iterator[Finding]:
    if facts.cudnn_error:
        why = f"{facts.cudnn_error} Another cuDNN than torch's own was loaded first."
        remedy = "unset LD_LIBRARY_PATH CUDNN_HOME CUDNN_PATH"
        yield Finding("cuDNN", "fail", "torch refuses the cuDNN that is loaded", why, remedy)
    elif facts.cudnn:
        yield Finding("cuDNN", "ok", facts.cudnn)
    version, error = facts.libraries.get("flash-attn-4"), facts.errors.get("flash-attn-4")
    if version and not error:
        yield Finding("FlashAttention", "ok", version)
    elif (_units(facts) or (0,))[0] == HOPPER:
        what, why = error or "flash-attn-4 is not installed", "The fused layers are slower without it."
        yield Finding("FlashAttention", "warn", what, why, 'pip install -e ".[fa4]"')


def _compilers(facts: Facts) -> Iterator[Finding]:
    if not _has_gpu(facts):
        return
    header = f"python{'.'.join(facts.python.split('.')[:2])}-dev"
    for tool, package in (("cc", "build-essential"), ("Python.h", header)):
        if not facts.tools.get(tool):
            what = f"{tool} is missing, with which Triton compiles at the first step"
            yield Finding("Triton", "fail", what, None, f"sudo apt-get install {package}")


def _disks(facts: Facts) -> Iterator[Finding]:
    for name, disk in facts.disks.items():
        what = f"{name} {disk.path}: {f'{disk.free / GIB:.1f} GiB free' if disk.writable else 'cannot be written'}"
        bad = not disk.writable or disk.free < LEAST_DISK.get(name, 0)
        status = "fail" if not disk.writable and name != "outputs" and _has_gpu(facts) else "warn" if bad else "ok"
        where = {"Triton's cache": "export TRITON_CACHE_DIR=FOLDER", "the temporary folder": "export TMPDIR=FOLDER"}
        yield Finding("disk", status, what, None, where.get(name, "cd FOLDER") if bad else None)


def _steps(facts: Facts) -> Iterator[Finding]:
    for name, step in facts.steps.items():
        if step.problem:
            status = "warn" if name == "bf16" else "fail"
            yield Finding("a step", status, f"a step in {name} gave no time: {step.problem}")
        else:
            told = f"{step.milliseconds:.1f} ms, {step.tokens_per_second:,.0f} tokens/s"
            yield Finding("a step", "ok", f"{name}, {LAYERS.get(step.backend or '', 'plain torch')}: {told}")


if __name__ == "__main__":
    sys.exit(programs.main("doctor", main, once_a_node=True))

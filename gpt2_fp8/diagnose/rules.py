"""What is recorded of a machine, what it means for FP8 in the order in which a person would mend it, and a verdict.

Facts are plain values, so that rules can be tried on machines that nobody here has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpt2_fp8.config import backend_support

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


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A folder that a run writes to; if it is not there yet, the nearest that is."""

    path: str
    free: int  # bytes
    writable: bool


@dataclass(frozen=True, kw_only=True)
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
    machine = Finding("machine", "ok", f"{facts.machine}, {facts.platform}, Python {facts.python}")
    return [machine, *(finding for rule in rules for finding in rule(facts))]


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
    """Return the compute capability of the GPU that a run takes."""
    return backend_support.parse_version(facts.capability or (facts.gpus[0][1] if facts.gpus else None))


def _may_fp8(facts: Facts) -> bool:
    return _has_gpu(facts) and (_units(facts) or backend_support.FP8_CAPABILITY) >= backend_support.FP8_CAPABILITY


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
        units = [backend_support.parse_version(capability) for _, capability in facts.gpus]
        able = [number for number, has in enumerate(units) if has and has >= backend_support.FP8_CAPABILITY]
        other = f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={able[0]}" if able else None
        what = f"the first GPU has compute capability {'.'.join(map(str, _units(facts) or ()))}, and FP8 needs 8.9"
        yield Finding("GPU", "fail", what, None, other or "python -m gpt2_fp8.run precision=bf16")


def _driver(facts: Facts) -> Iterator[Finding]:
    can, built = backend_support.parse_version(facts.driver_cuda), backend_support.parse_version(facts.torch_cuda)
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
    elif (_units(facts) or (0,))[0] == backend_support.HOPPER:
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

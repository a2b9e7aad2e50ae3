"""What is recorded of a machine: plain values, which go into a JSON file and come back. Standard library only.

A report from another machine is such a file. So rules can be tried on machines that nobody here has.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gpt2_fp8.config import parsing
from gpt2_fp8.config.errors import UserError

FORMAT = "gpt2_fp8 doctor 1"
AGAIN = "make the report again, with this version: python -m gpt2_fp8.doctor --json > FILE"


@dataclass(frozen=True, kw_only=True)
class System:
    """The host. Sizes are bytes; None: the system does not say."""

    platform: str  # kernel and C library
    machine: str  # x86_64, aarch64
    python: str
    container: bool
    cpus: int
    memory: int | None  # of the machine or its container, whichever has less
    memory_left: int | None
    memory_limit: str | None  # what sets the least: this machine, a container, or a shell's limit
    shared_memory: int | None  # size of /dev/shm


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as its driver describes it."""

    name: str
    capability: str | None  # "9.0"
    memory_mib: int | None
    used_mib: int | None


@dataclass(frozen=True, kw_only=True)
class Driver:
    """NVIDIA's driver."""

    version: str | None
    cuda: str | None  # the newest CUDA that it can run
    error: str | None  # why nvidia-smi gave no answer
    device_files: bool  # whether /dev has an NVIDIA GPU
    on_bus: int  # NVIDIA GPUs on the PCI bus, whether or not there is a driver
    links: str | None  # the matrix of `nvidia-smi topo -m`; None with one GPU


@dataclass(frozen=True, kw_only=True)
class Torch:
    """PyTorch, imported in a process of its own."""

    error: str | None  # why it does not import; the rest is then unknown
    version: str | None
    cuda: str | None  # the CUDA that it was built with; None: it is a build for CPUs
    available: bool  # whether it can use a GPU
    unavailable: str | None  # why not, in CUDA's words
    gpu: str | None  # the GPU that a run would take
    capability: str | None
    architectures: list[str]  # that it has kernels for: sm_90, ...
    nccl: str | None


@dataclass(frozen=True, kw_only=True)
class Cudnn:
    """cuDNN, of which a machine may have several."""

    error: str | None  # why torch refuses the one that is loaded
    version: str | None  # of the one that is loaded
    loaded: list[str]  # libcudnn.so files in the process, after torch and Transformer Engine
    first: str | None  # the one that LD_LIBRARY_PATH, or CUDNN_HOME or CUDNN_PATH, puts before torch's own
    first_version: str | None
    own: str | None  # torch's own, from its package
    own_version: str | None


@dataclass(frozen=True, kw_only=True)
class Library:
    """A package that FP8 or its speed may depend on."""

    version: str | None  # None: it is not installed
    wanted: str | None  # the versions that this project takes
    error: str | None  # why it does not load or cannot be used; None if it can, or was not tried


@dataclass(frozen=True, kw_only=True)
class Build:
    """What compiles: Triton's kernels at their first use, and Transformer Engine when it is installed.

    A path; None: it is not there.
    """

    cc: str | None
    cxx: str | None
    cxx_version: str | None
    nvcc: str | None
    nvcc_version: str | None  # the CUDA of it
    python_h: str | None
    cuda_runtime_h: str | None
    cudnn_h: str | None


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder that a run writes to; if it is not there yet, the nearest that is."""

    path: str
    free: int | None  # bytes
    writable: bool
    executable: bool  # whether a library in it can be loaded: not on a disk mounted noexec


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run with a precision, a recipe and a backend would do here, as the backends say."""

    precision: str
    recipe: str | None
    backend: str
    works: bool
    offered: bool  # whether these settings fit each other on any machine
    reason: str | None  # why it does not work


@dataclass(frozen=True, kw_only=True)
class Step:
    """A measured training step."""

    precision: str  # that ran
    backend: str | None
    milliseconds: float | None
    tokens_per_second: float | None
    tokens: int  # in a step
    problem: str | None  # why there is no time


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is known of a machine.

    `gpus` are numbered. `libraries`, `places`, `runs` and `steps` are by name. `environment` holds the variables that
    change how FP8 runs.
    """

    gpt2_fp8: str
    system: System
    driver: Driver
    gpus: dict[str, Gpu]
    torch: Torch
    cudnn: Cudnn
    libraries: dict[str, Library]
    build: Build
    environment: dict[str, str]
    places: dict[str, Place]
    runs: dict[str, Run]
    steps: dict[str, Step]
    failed: dict[str, str]  # what could not be asked, and why: a process that crashed or took too long


def to_json(facts: Facts) -> dict[str, Any]:
    """Return facts as plain JSON values."""
    return asdict(facts)


def from_json(report: object, name: str) -> Facts:
    """Return the facts of a report, the object that `--json` prints. `name`: the file, for messages.

    Raises UserError if it is another kind of object, or of another version.
    """
    if not isinstance(report, dict) or not isinstance(report.get("facts"), dict):
        raise UserError.of(f"{name} is no report: it is not an object with the key facts", AGAIN)
    if report.get("format") != FORMAT:
        raise UserError.of(f"{name} has the format {report.get('format')!r}, and {FORMAT!r} is read", AGAIN)
    facts, found = parsing.build(Facts, report["facts"], "facts")
    if facts is None:
        raise UserError.of(f"{name}: {found[0].problem.cause}", AGAIN)
    return facts

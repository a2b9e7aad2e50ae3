"""What is recorded of a machine, as plain values, so that rules can be tried on machines that nobody here has."""

from __future__ import annotations

from dataclasses import dataclass, field

FORMAT = "gpt2_fp8 doctor 2"


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
    shared_memory: int | None  # bytes of /dev/shm
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

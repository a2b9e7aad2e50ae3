"""One measurement: full training steps of one configuration, in its own process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.measure import subprocesses

Status = Literal["ok", "out of memory", "refused", "failed", "timed out"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to measure. A step is a whole optimizer step.

    That is `global_batch_size` sequences in micro-batches, clipped and applied, on tokens of the configuration's data
    set that are already on the device.
    """

    config: RunConfig
    steps: int  # timed
    warmup: int  # steps before them: compilation, calibration, settling of the GPU's clock
    profile: bool = False  # whether one more step runs under torch's profiler


WAITS = "(between kernels)"  # the name of the line for the time in which a GPU ran none


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One line of a profile."""

    name: str
    milliseconds: float  # in one step
    share: float  # part of the step's time on the device, 0 to 1
    calls: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one case. A field is None if the case ended before it was measured."""

    status: Status
    message: str | None = None  # why, in one line, unless the status is "ok"
    remedy: str | None = None  # what the user can do about it, if that is known
    device: str | None = None
    ran: str | None = None  # the precision that ran: fp32, bf16, fp8_hybrid, fp8_e4m3
    reason: str | None = None  # why it is not what was asked for, if so
    backend: str | None = None
    layers: str | None = None  # the backend's word for what it is made of
    compiled: bool | None = None
    attention: str | None = None  # the kernel of attention, in the backend's words
    tokens_per_second: float | None = None  # the median of the timed steps
    slowest: float | None = None  # tokens per second of the slowest and of the fastest timed step
    fastest: float | None = None
    mfu_bf16: float | None = None
    peak_memory_gb: float | None = None  # GiB allocated; None on a CPU
    losses: list[float] = field(default_factory=list)  # of every step, with warm-up
    grad_norms: list[float] = field(default_factory=list)
    profile: list[Kernel] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def measure(case: Case, timeout_s: float, log: Path | None = None) -> Result:
    """Run a case in a child process, so that a crash, too little memory or a hang is only a row.

    `log`: where the child's output is kept. Returns a Result whatever happens to the child. Raises KeyboardInterrupt
    after the child is gone.
    """
    ended = subprocesses.run("gpt2_fp8.measure.worker", asdict(case), timeout_s, log)
    if ended.status != "ok":
        return Result(status=ended.status, message=ended.message)
    kernels = [Kernel(**kernel) for kernel in ended.answer.pop("profile")]
    return Result(**ended.answer, profile=kernels)

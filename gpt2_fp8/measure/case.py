"""One measurement: full training steps of one configuration, in a process of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.measure import subprocesses

Status = Literal["ok", "out of memory", "refused", "failed", "timed out"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to measure. A step is a whole optimizer step: `global_batch_size` sequences in micro-batches, clipped and
    applied, on tokens of the configuration's data set that lie ready on the device."""

    config: RunConfig
    steps: int  # timed
    warmup: int  # before them: compilation, calibration, the GPU's clock
    profile: bool = False  # one more step under torch's profiler


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One line of a profile."""

    name: str
    milliseconds: float  # of one step
    share: float  # of the step's time on the device, 0 to 1
    calls: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a case was like. Numbers are None where it did not come so far."""

    status: Status
    message: str | None = None  # why, in one line, where the status is not "ok"
    remedy: str | None = None  # what to do about it, where that is known
    device: str | None = None
    ran: str | None = None  # the precision that ran: fp32, bf16, fp8_hybrid, fp8_e4m3
    reason: str | None = None  # where that is not what was asked for
    backend: str | None = None
    compiled: bool | None = None
    tokens_per_second: float | None = None  # median over the timed steps
    slowest: float | None = None  # tokens per second of the slowest and of the fastest timed step
    fastest: float | None = None
    mfu_bf16: float | None = None
    peak_memory_gb: float | None = None  # GiB allocated; None on a CPU
    losses: list[float] = field(default_factory=list)  # of every step, warm-up included
    grad_norms: list[float] = field(default_factory=list)
    profile: list[Kernel] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def measure(case: Case, timeout_s: float, log: Path | None = None) -> Result:
    """Run a case in a child process, so that a crash, a lack of memory or a hang is a row and not the end. `log`: where
    the child's output is kept.

    Returns a Result whatever happens to the child. Raises KeyboardInterrupt, with the child gone.
    """
    ended = subprocesses.run("gpt2_fp8.measure.worker", asdict(case), timeout_s, log)
    if ended.status != "ok":
        return Result(status=ended.status, message=ended.message)
    kernels = [Kernel(**kernel) for kernel in ended.answer.pop("profile")]
    return Result(**ended.answer, profile=kernels)

"""A profile of a few steps by torch's profiler: its table of kernels, and a trace, in the run's folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from gpt2_fp8.config.shown import as_typed

log = logging.getLogger(__name__)

TABLE, TRACE = "profile.txt", "trace.json.gz"
_STEPS = 5  # that are recorded
_SKIPPED = 10  # before them, in which kernels are compiled and scales settle
_LOGGED = 10  # kernels


class Profiler(pl.Callback):
    """Records the steps 12 to 16 of a `fit`, or the last ones of a shorter one, of this rank alone.

    Writes `folder/profile.txt`, the kernels of a GPU or the operators of a CPU by their own time, and
    `folder/trace.json.gz` for ui.perfetto.dev. Logs the first ten lines. Raises OSError.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._profile: torch.profiler.profile | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin. The step before the recorded ones warms the profiler up."""
        steps = trainer.max_steps - trainer.global_step
        active = max(1, min(_STEPS, steps - 1))
        schedule = torch.profiler.schedule(
            skip_first=max(0, min(_SKIPPED, steps - _STEPS - 1)), wait=0, warmup=int(steps > 1), active=active, repeat=1
        )
        on_gpu = pl_module.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profile = torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=self._write)
        self._profile.start()

    def on_train_batch_end(self, *args: Any) -> None:
        """Count the step."""
        if self._profile is not None:
            self._profile.step()

    def on_train_end(self, *args: Any) -> None:
        """Stop; what is still being recorded is written."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def on_exception(self, *args: Any) -> None:
        """Stop: the next run of this process may record, too."""
        self.on_train_end()

    def _write(self, profile: torch.profiler.profile) -> None:
        """Write both files, and log where the time went."""
        on_gpu = ProfilerActivity.CUDA in profile.activities
        own, kind = ("self_device_time_total", DeviceType.CUDA) if on_gpu else ("self_cpu_time_total", DeviceType.CPU)
        events = profile.key_averages()
        table = events.table(sort_by=own, row_limit=-1, max_name_column_width=120)
        (self.folder / TABLE).write_text(table)
        profile.export_chrome_trace(str(self.folder / TRACE))
        parts = [event for event in events if event.device_type == kind and not event.is_user_annotation]
        times = {event.key: (getattr(event, own), event.count) for event in parts}
        whole = sum(time for time, _ in times.values()) or 1.0
        for name, (time, count) in sorted(times.items(), key=lambda found: -found[1][0])[:_LOGGED]:
            log.info("profile    %5.1f %% %9.2f ms %6d x %s", 100 * time / whole, time / 1e3, count, name[:60])
        log.info("profile    all: %s, %s", as_typed(self.folder / TABLE), as_typed(self.folder / TRACE))

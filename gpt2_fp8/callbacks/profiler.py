"""Five steps under torch's profiler: its table and a trace in the run's folder, ten lines in the log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

log = logging.getLogger(__name__)

_STEPS = 5  # that are recorded
_SKIPPED = 10  # before them, in which kernels are compiled; one more warms the profiler up


class Profiler(pl.Callback):
    """Writes `profile.txt`, by a GPU's own time or the CPU's, and `trace.json.gz` of steps of this rank alone.

    They are the steps 12 to 16 of a `fit`, or the last ones of a shorter one. Raises OSError.
    """

    def __init__(self, folder: Path):
        self._table, self._trace = folder / "profile.txt", folder / "trace.json.gz"
        self._profile: torch.profiler.profile | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin, with what is to come in view."""
        steps = trainer.max_steps - trainer.global_step
        skipped, active = max(0, min(_SKIPPED, steps - _STEPS - 1)), max(1, min(_STEPS, steps - 1))
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if pl_module.device.type == "cuda" else [])]
        schedule = torch.profiler.schedule(skip_first=skipped, wait=0, warmup=int(steps > 1), active=active, repeat=1)
        self._profile = torch.profiler.profile(activities=kinds, schedule=schedule, on_trace_ready=self._write)
        self._profile.start()

    def on_train_batch_end(self, *args: Any) -> None:
        """Count the step."""
        assert self._profile is not None
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
        on_gpu = ProfilerActivity.CUDA in profile.activities
        own, kind = ("self_device_time_total", DeviceType.CUDA) if on_gpu else ("self_cpu_time_total", DeviceType.CPU)
        events = profile.key_averages()
        self._table.write_text(events.table(sort_by=own, row_limit=-1, max_name_column_width=120))
        profile.export_chrome_trace(str(self._trace))
        parts = [event for event in events if event.device_type == kind and not event.is_user_annotation]
        whole = sum(getattr(event, own) for event in parts) or 1.0
        for event in sorted(parts, key=lambda event: -getattr(event, own))[:10]:
            time, name = getattr(event, own), event.key[:60]
            log.info("profile    %5.1f %% %9.2f ms %6d x %s", 100 * time / whole, time / 1e3, event.count, name)
        log.info("profile    all: %s, and %s for ui.perfetto.dev", self._table.name, self._trace.name)

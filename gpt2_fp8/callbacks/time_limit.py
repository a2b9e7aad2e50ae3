"""Ends a run after a time of training (`trainer.max_time`), and remembers that time over resumes.

Lightning's `Timer` does nearly this. But it exchanges its answer through the GPU after every step, which waits there,
and it forgets the time of steps that a rollback leaves behind.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gpt2_fp8.runtime import collectives

log = logging.getLogger(__name__)


class TimeLimit(Callback):
    """Stops a run after the step in which its time is over. That step is logged, validated and saved like a last one.

    The time runs from the start of training on, through validations and checkpoints, and through the way back after a
    divergence. Training before a resume counts, up to the checkpoint. All ranks stop at the same step: the first one at
    which the time is over for any of them. Callbacks that look at `trainer.should_stop` come after this one.

    Args:
        seconds: the time; None: no limit. The time is kept all the same, for a resume that has one.

    Attributes:
        reached: whether the time is over.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.reached = False
        self._before = 0.0  # in processes before this one
        self._began: float | None = None

    @property
    def trained(self) -> float:
        """Return the seconds of training so far, over all resumes."""
        return self._before + (0.0 if self._began is None else time.monotonic() - self._began)

    def left(self) -> float | None:
        """Return the seconds that are left, or None without a limit."""
        return None if self.seconds is None else max(self.seconds - self.trained, 0.0)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop before the first step if the time was over at the checkpoint, which Lightning has restored by now."""
        self._look(trainer, "already complete: %.0f s of trainer.max_time were over at the checkpoint")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, unless it runs since an earlier `fit` of this process."""
        self._began = time.monotonic() if self._began is None else self._began

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop after this step if the time is over. Collective."""
        self._look(trainer, f"the %.0f s of trainer.max_time are over at step {trainer.global_step}")

    def _look(self, trainer: Trainer, said: str) -> None:
        if self.seconds is None or not collectives.largest(int(self.trained >= self.seconds)):
            return
        if trainer.is_global_zero and not self.reached:
            log.info(said, self.seconds)
        self.reached = trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds of training so far."""
        return {"seconds": self.trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Add the training before this process. After a rollback nothing is added: the clock still runs."""
        if self._began is None:
            self._before = state_dict["seconds"]

"""SIGINT and SIGTERM: finish the step, save, and leave with 130 or 143. A second signal leaves at once.

In training the handler only sets a flag: saving inside one can fall into the middle of a backward pass
(https://github.com/Lightning-AI/pytorch-lightning/issues/21406, open in 2.6.6). Before it, `Stopped` is raised at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from gpt2_fp8.config.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A terminal's Ctrl-C reaches the whole process group, and launchers (torchrun, srun) pass it on: one wish, two signals.
_ECHO_SECONDS = 0.5


class GracefulStop(Checkpoint):
    """Turns a signal into a saved end: `Stopped` is raised in `fit` at the end of the running step.

    Used as a context around everything that should end this way, so that the handlers also stand before `fit`, between
    two of them, and go back to what they were whatever happens:

        with GracefulStop(save=tiers.save) as stop:
            Trainer(callbacks=[..., tiers, stop]).fit(...)

    It is a `Checkpoint` because Lightning moves those behind all other callbacks, in their order: when the run is
    saved here, every other callback has finished its step.

    Args:
        save: called with the trainer on every rank, before `Stopped` is raised.
    """

    def __init__(self, save: Callable[[Trainer], Any]) -> None:
        self._save = save
        self._received: int | None = None
        self._received_at = 0.0
        self._training = False
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> int | None:
        """The signal that this process has received, for loops of one's own to poll; None: none."""
        return self._received

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.getsignal(number) for number in SIGNALS}
            self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: it was set by something other than Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals back from Lightning, which set its own handlers a moment ago; stop if it is time."""
        if self._previous:
            self._install()
        self._training = True
        if signum := self._agreed(trainer):
            raise Stopped(signum)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop here, after the step, if asked to."""
        if signum := self._agreed(trainer):
            self._save(trainer)
            # Lightning logs a step's metrics after this hook, which the exception skips. The resumed run will not.
            trainer._logger_connector.on_batch_end()
            trainer._logger_connector.update_train_step_metrics()
            raise Stopped(signum)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop in the midst of a validation, which the resumed run will do from its beginning."""
        if signum := self._agreed(trainer):
            self._save(trainer)
            raise Stopped(signum)

    def _install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if not self._training:  # nothing to save yet, and nobody who would look at a flag
            raise Stopped(signum)
        now = time.monotonic()
        if self._received is None:
            self._received, self._received_at = signum, now
            name = signal.Signals(signum).name
            # Not print(): it may be the very call that the signal interrupted.
            os.write(2, f"\n{name}: stopping after this step; once more to leave at once\n".encode())
        elif now - self._received_at > _ECHO_SECONDS:
            os._exit(128 + signum)

    def _agreed(self, trainer: Trainer) -> int:
        """The signal that any rank has received, 0 for none; the same on all of them. One small reduction a step."""
        signum = self._received or 0
        if trainer.world_size > 1:
            agreed = torch.tensor(signum, device=trainer.strategy.root_device)
            torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
            signum = int(agreed.item())
        return signum

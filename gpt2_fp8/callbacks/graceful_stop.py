"""Ends training between two steps: at a signal (`runtime/signals.py`), without data, after a time, if it diverges.

The last finished step is saved, on every rank, and the run ends. A single process does not finish the step in which
the signal comes, since that may take minutes on a CPU: `signals.look` gives it up between two of its passes, and
`Attempts` undoes its changes. Several ranks, or a step of CUDA graphs, finish it; ranks agree.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.compat import lightning_private as loops
from gpt2_fp8.config.errors import DataSourceLost, Diverged, RunError, Stopped
from gpt2_fp8.config.schema import CallbacksConfig
from gpt2_fp8.engine.divergence import DivergencePolicy, RollBack
from gpt2_fp8.engine.step import StepResult
from gpt2_fp8.runtime import collectives, ranks, rendezvous, signals, slurm
from gpt2_fp8.runtime.signals import Interrupted, Signals

log = logging.getLogger(__name__)

_NO_DATA = 256  # what a rank without data tells the others: larger than any signal's number


class GracefulStop(Checkpoint):
    """Turns a signal into a saved end: `Stopped` leaves `fit` at the end of the running step, or from a wait for data.

    It is a context around everything that should end this way, also before `fit` and between two `fit`s, and restores
    the handlers of before. It is a `Checkpoint` because Lightning moves those after all other callbacks, in their
    order. So when the run is saved here, every other callback has finished its step.

    Args:
        save: called with the trainer on every rank, before the run is left. It must return only when the checkpoint is
            on the disk: under SLURM the job may be in the queue again a moment later.
    """

    def __init__(self, save: Callable[[Trainer], Any]) -> None:
        self._save = save
        self._signals = Signals()  # these handle nothing; those of the context do
        self._context = ExitStack()
        self._waiting = False  # for the next step's data
        self._validating = False

    def __enter__(self) -> GracefulStop:
        self._signals = self._context.enter_context(signals.handle_signals())
        if self._signals.received is not None:  # it came after a sweep's job, and was held until now
            self._context.close()
            raise slurm.requeue_or_stop(self._signals.received)
        self._validating = False
        self._signals.release()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._signals.hold()  # only the end of the run follows: its summary
        self._signals.gives_up = False
        self._context.close()
        if self._signals.thrown and error is not None and not isinstance(error, Stopped):
            assert self._signals.received is not None
            raise slurm.requeue_or_stop(self._signals.received) from None  # its error may have become another one
        if type(error) is Stopped and ranks.is_batch_job():  # rank 0 may have got another signal, or none
            raise slurm.requeue_or_stop(error.exit_code - 128) from None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals back from Lightning, which has just set its own handlers; stop if a signal came."""
        if self._signals.installed:
            self._signals.install()
            self._signals.watch()
            loops.leave_signals_alone(trainer)
        self._signals.hold()
        self._signals.gives_up = not collectives.is_distributed()  # only a single process can leave a step
        self._waiting = True
        self._stop_if(self._agree())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Learn before the step whether another rank must stop or got no data, while all ranks waited for data."""
        self._waiting = False
        if collectives.is_distributed() and (reason := self._agree()):
            self._save_last_step(trainer)
            self._stop_if(reason)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop here, after the step, if a signal came."""
        slurm.note_step()
        if signum := self._agree():
            self._save_and_stop(trainer, signum)
        self._waiting = not loops.is_last_step(trainer)

    def on_validation_start(self, *_: Any) -> None:
        """Note that a later error is not a wait for data."""
        self._waiting, self._validating = False, True

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        """Return to the steps, if any are left."""
        self._validating = False
        self._waiting = not loops.is_last_step(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop in the middle of a validation. The resumed run starts that validation again."""
        if signum := self._agree():
            self._save_and_stop(trainer, signum)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the last step if a signal ended the next one or the wait for its data, or if the data source ended."""
        waited, self._waiting = self._waiting, False
        if isinstance(exception, Interrupted) and (waited or self._signals.gives_up):
            self._agree()  # the other ranks ask at the start of their step
        elif isinstance(exception, RunError) and not isinstance(exception, (Stopped, Diverged)) and waited:
            self._agree(_NO_DATA)
        else:
            return
        self._signals.gives_up = False  # saving may have to finish the last step first, even by a bf16 rerun
        with self._not_saved(trainer):  # the run ends because of `exception`
            self._save(trainer) if self._validating else self._save_last_step(trainer)

    def _save_and_stop(self, trainer: Trainer, signum: int) -> NoReturn:
        with self._not_saved(trainer):
            self._save(trainer)
        if not self._validating:
            loops.log_last_step(trainer)
        raise Stopped(signum)

    @staticmethod
    @contextmanager
    def _not_saved(trainer: Trainer) -> Iterator[None]:
        """Warn of what ends the run by itself while it saves: it has another end."""
        try:
            yield
        except (RollBack, RunError) as error:
            log.warning("step %d is not saved, continuing will come to it again: %s", trainer.global_step, error)

    def _save_last_step(self, trainer: Trainer) -> None:
        """Save between two steps what the last hook of the step, or of its validation, would have saved."""
        loops.set_back_to_last_step(trainer)
        self._save(trainer)

    def _agree(self, own: int | None = None) -> int:
        """Return why any rank has to stop, the same on all of them; 0 for no reason. Collective.

        `own`: this rank's reason, if not the signal that it has received.
        """
        if reason := collectives.largest(own or self._signals.received or 0):
            rendezvous.ending()
        return reason

    @staticmethod
    def _stop_if(reason: int) -> None:
        if reason == _NO_DATA:
            raise DataSourceLost("another rank gets no data")
        if reason:
            raise Stopped(reason)


class TimeLimit(Callback):
    """Stops a run after the step in which its time is over (`trainer.max_time`): the step is a last one like any.

    The time runs from the start of training on, through validations, checkpoints and rollbacks. Training before a
    resume counts, up to the checkpoint. All ranks stop at the first step at which it is over for any of them.
    Lightning's `Timer` exchanges its answer through the GPU, which waits, and forgets steps that a rollback leaves.
    Callbacks that look at `trainer.should_stop` come after this one.

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


class DivergenceGuard(Callback):
    """Raises what `DivergencePolicy.judge` raises: RollBack for the run to catch, or Diverged.

    One object serves a whole run, in the `fit`s before and after a rollback. It comes after the callbacks that log and
    before those that save, so nothing of a rolled-back step is saved.

    Args:
        config: the limits.
        save: called with the trainer on every rank at the end of the first step after a rollback, so that a killed run
            resumes after the rollback, not before it. Returns whether the save succeeded.
    """

    def __init__(self, config: CallbacksConfig, save: Callable[[Trainer], bool]):
        limits = config.nonfinite_limit, config.divergence_sigma, config.divergence_steps
        self.policy = DivergencePolicy(
            *limits, say=rank_zero_only(partial(log.warning, "%s"))
        )  # all ranks decide alike
        self._save = save
        self._save_next = False

    def start_again(self) -> None:
        """Reset the policy between two `fit`s, after a rollback."""
        self.policy.start_again()
        self._save_next = True

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Subscribe to each settled step: first of all, since a row of the log may need its explanation."""

        def judge(result: StepResult) -> None:
            self.policy.judge(trainer.global_step, result.read(), result.first)

        pl_module.step.on_settled.insert(0, judge)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save the first step after a rollback, once it is judged."""
        if self._save_next:
            self._save_next = not self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's state."""
        return self.policy.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the policy's state."""
        self.policy.load_state_dict(state_dict)

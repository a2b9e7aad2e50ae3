"""An engine's work in batches that fit into memory: what is too large is done again in smaller ones. Plain torch.

Where this process is alone, a signal ends it between two passes (`signals.look`), with the engine as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from gpt2_fp8.engine.engine import Engine
from gpt2_fp8.engine.out_of_memory import Fitting
from gpt2_fp8.runtime import collectives, signals

Context = Callable[[], AbstractContextManager]


class Attempts:
    """The gradients of a step and the sums of an evaluation, each with a batch size of its own, which only falls.

    Tokens per step, their order and the schedule do not depend on any of them. `backward` is called with each
    micro-batch's loss, inside `no_sync`: ranks average their gradients afterwards, once all have succeeded. `asked`:
    the micro-batch that the settings name, where the engine begins with another.
    """

    def __init__(
        self, engine: Engine, backward: Callable[[Tensor], None], no_sync: Context, asked: int | None = None
    ):  # fmt: skip
        self.engine, self._backward, self._no_sync = engine, backward, no_sync
        self._asked = asked or engine.micro_batch_size
        self._share = engine.config.global_batch_size // collectives.rank_and_world()[1]  # of a step, this rank's
        self.training = Fitting(engine.micro_batch_size, "micro_batch_size")
        self._in_bf16: Fitting | None = None
        self._evaluation: Fitting | None = None

    def calibrate(self, ids: Tensor, context: Context) -> None:
        """As `Engine.calibrate`: the first thing that a run of an FP8 recipe computes, and so the first that may not
        fit. All ranks call this at once, and have the same scales then."""

        def of(size: int) -> Tensor:
            self.engine.micro_batch_size = size
            with self._no_sync(), torch.enable_grad():
                self.engine.calibrate(ids, _looking(context))
            return ids  # nothing is asked for, and None would be no result

        # `ids` may be a validation's, but the sizes to come to are those that training can go on with.
        with self._given_up():
            self.training(of, self._share, self.engine.forget, ids.device, ranks=True, settles=False)
        self.engine.agree()

    def gradients(self, ids: Tensor, context: Context) -> Tensor:
        """As `Engine.gradients`, averaged over the ranks, which all call this at once."""

        def of(size: int) -> Tensor:
            moments = [] if self.training.settled else self.engine.like_moments()
            self.engine.micro_batch_size = size
            with self._no_sync():
                # A recording is not to be left in its midst, and its replays take no time.
                looking = context if self.engine.plan.graphs else _looking(context)
                loss = self.engine.gradients(ids, looking, self._look_and_go_back)
            del moments
            return loss

        return self._of_all_ranks(self.training, of, ids)

    def gradients_in_bf16(self, ids: Tensor, context: Context) -> Tensor:
        """As `Engine.gradients_in_bf16`, likewise; its layers may keep more than those that compute in FP8."""

        def of(size: int) -> Tensor:
            with self._no_sync():
                return self.engine.gradients_in_bf16(ids, _looking(context), self._look_and_go_back, size)

        if self._in_bf16 is None:
            self._in_bf16 = Fitting(self.training.size, "micro_batch_size in bf16")
        return self._of_all_ranks(self._in_bf16, of, ids)

    def _of_all_ranks(self, sizes: Fitting, of: Callable[[int], Tensor], ids: Tensor) -> Tensor:
        with self._given_up():
            loss = sizes(of, self._share, self.engine.forget, ids.device, ranks=True)
        collectives.average(self.engine.parameters)
        self.engine.agree()
        return loss

    @contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            yield
        except signals.Interrupted:
            self.engine.forget()
            raise

    def _look_and_go_back(self, loss: Tensor) -> None:
        signals.look()
        self._backward(loss)

    def evaluate(self, ids: Tensor) -> Tensor:
        """float64 [2]: the sum of the losses of this rank's `ids` [sequences, n_positions + 1], and how many targets
        that were. In the forward context, without gradients."""

        def of(size: int) -> Tensor:
            return torch.stack([self._sums(part) for part in ids.split(size)]).sum(0)

        if self._evaluation is None:
            self._evaluation = Fitting(len(ids), "the batch of a validation")
        return self._evaluation(of, len(ids), lambda: None, ids.device, ranks=False)

    def _sums(self, ids: Tensor) -> Tensor:
        signals.look()
        count = (ids[:, 1:] >= 0).sum()
        total = self.engine.loss(ids).double() * count
        return torch.stack([torch.where(count > 0, total, 0.0), count.double()])

    def state_dict(self) -> dict[str, int]:
        """The micro-batch that was asked for, and the one that fits."""
        return {"asked": self._asked, "fits": self.training.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin with what fitted before, where the same was asked for then."""
        if state["asked"] == self._asked and state["fits"] and self._share % state["fits"] == 0:
            fits = min(state["fits"], self.training.size)  # less where memory has become less
            self.training.size = self.engine.micro_batch_size = fits
            self.training.settled = True


def _looking(context: Context) -> Context:
    """`context`, entered before each forward, which is given up where a signal came."""

    def looking() -> AbstractContextManager:
        signals.look()
        return context()

    return looking

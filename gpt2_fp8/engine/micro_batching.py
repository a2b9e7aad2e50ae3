"""A step in micro-batches that fit into memory: a size that is too large is replaced by a smaller one. Plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.engine.out_of_memory import Fitting
from gpt2_fp8.runtime import collectives
from gpt2_fp8.runtime.signals import Interrupted

log = logging.getLogger(__name__)

IN_BF16 = "micro_batch_size in bf16"


class MicroBatching:
    """Computes a step's gradients and an evaluation's sums, each with its own batch size, which only falls.

    Tokens per step, their order and the schedule do not depend on these sizes. Ranks average their gradients after the
    backward, when all have succeeded: a rank that ran out of memory within it would leave the others waiting.

    Args:
        gradients: computes them.
        share: sequences of a step that this rank computes.
        size: sequences of a micro-batch, as the settings ask for.
        optimizer_state: allocates as much memory as the first update will need for the optimizer's state. It is held
            while the first gradients are computed. Otherwise a size could fit only because there is no optimizer state
            yet. A recording's peak then leaves room for it too: memory inside a graph does not count as allocated.
    """

    def __init__(
        self,
        gradients: Gradients,
        share: int,
        size: int,
        optimizer_state: Callable[[], list[Tensor]] = list,
    ):
        self._gradients, self._share, self._optimizer_state = gradients, share, optimizer_state
        self._asked = size
        self.training = Fitting(size, "micro_batch_size")
        self._in_bf16: Fitting | None = None
        self._evaluation: Fitting | None = None
        self._in_room_of_graphs = False

    def parts(self) -> int:
        """Return the number of micro-batches of the last step."""
        return -(-self._share // self.training.size)

    def calibrate(self, ids: Tensor) -> None:
        """Find the first scales, as `Gradients.calibrate`. Collective: all ranks have the same scales afterwards.

        It is the first thing that a run of an FP8 recipe computes, and so the first that may not fit.
        """

        def of(size: int) -> Tensor:
            self._gradients.calibrate(ids, size)
            return ids  # a dummy result

        # `ids` may belong to a validation, but the size must be one with which training can go on.
        with self._given_up():
            self.training(of, self._share, self._gradients.discard, ids.device, ranks=True, proves_size=False)
        self._gradients.scaling.agree()

    def gradients(self, ids: Tensor) -> Tensor:
        """Compute what `Gradients.of_step` does, averaged over the ranks. Collective."""

        def of(size: int) -> Tensor:
            optimizer_state = [] if self.training.proven else self._optimizer_state()
            loss = self._gradients.of_step(ids, size)
            del optimizer_state
            return loss

        return self._of_all_ranks(self.training, of, self._gradients.discard, ids)

    def gradients_in_bf16(self, ids: Tensor, many: bool = False) -> Tensor:
        """Compute what `Gradients.of_step_in_bf16` does, averaged over the ranks. Collective.

        Its layers may keep more memory than those that compute in FP8, so it has its own size. Where that does not fit
        beside the CUDA graphs, their memory is freed first. With `many` it is freed in any case: none in FP8 follows.
        """
        if self._in_bf16 is None:
            self._in_bf16 = Fitting(self.training.size, IN_BF16)
        if many:
            self._in_bf16.saves = "precision.bf16_last_steps=0"
            self._gradients.release_graphs()

        def discard() -> bool:
            freed = collectives.any_rank(self._gradients.release_graphs())  # a validation may have freed one rank's
            if freed:
                log.warning("no room for a step in bf16 beside training's CUDA graphs: they are recorded again")
            self._gradients.discard()
            return freed

        def of(size: int) -> Tensor:
            return self._gradients.of_step_in_bf16(ids, size, many)

        return self._of_all_ranks(self._in_bf16, of, discard, ids)

    def _of_all_ranks(
        self, sizes: Fitting, of: Callable[[int], Tensor], discard: Callable[[], bool | None], ids: Tensor
    ) -> Tensor:
        with self._given_up():
            loss = sizes(of, self._share, discard, ids.device, ranks=True)
        collectives.average(self._gradients.parameters)
        self._gradients.scaling.agree()
        return loss

    @contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            yield
        except Interrupted:
            self._gradients.discard()
            raise

    def evaluate(self, ids: Tensor) -> Tensor:
        """Compute the sum of the losses of this rank's `ids` and the number of their targets: float64 [2].

        ids: [sequences, n_positions + 1]. No gradients are computed.
        """

        def of(size: int) -> Tensor:
            return torch.stack([self._sums(part) for part in ids.split(size)]).sum(0)

        if self._evaluation is None:
            # computing blocks again saves nothing without a backward
            self._evaluation = Fitting(len(ids), "the batch of a validation", saves="")
        if self._in_room_of_graphs:
            self._gradients.release_graphs()
        return self._evaluation(of, len(ids), self._make_room, ids.device, ranks=False)

    def _make_room(self) -> bool:
        """Free the CUDA graphs of training; return whether there were any. From then on every validation begins so."""
        if freed := self._gradients.release_graphs():
            self._in_room_of_graphs = True
            log.warning("no room for a validation beside training's CUDA graphs: they are recorded again after each")
        return freed

    def _sums(self, ids: Tensor) -> Tensor:
        count = (ids[:, 1:] >= 0).sum()
        total = self._gradients.evaluated(ids).double() * count
        return torch.stack([torch.where(count > 0, total, 0.0), count.double()])

    def state_dict(self) -> dict[str, int]:
        """Return the micro-batch size that was asked for, and the one that fits; also in bf16, once that is known."""
        in_bf16 = {} if self._in_bf16 is None else {"fits_in_bf16": self._in_bf16.size}
        return {"asked": self._asked, "fits": self.training.size, **in_bf16}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin with the size that fitted before, if the same size was asked for then."""
        if state["asked"] == self._asked and state["fits"] and self._share % state["fits"] == 0:
            self.training.size = min(state["fits"], self.training.size)  # smaller if there is less memory now
            self.training.proven = True
            if (in_bf16 := state.get("fits_in_bf16")) and self._share % in_bf16 == 0:
                self._in_bf16 = Fitting(in_bf16, IN_BF16)

"""A step's gradients ahead of the verdict on the step before it: launched early, and taken back where that matters."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gpt2_fp8.engine.attempts import Attempt, Attempts
from gpt2_fp8.runtime import collectives
from gpt2_fp8.runtime.moments import Gap


class Ahead:
    """Holds the attempt at the next step while the last one is being settled. Collective.

    A verdict that changes weights or scales takes it back, and it is made again: the numbers are the same.

    Args:
        attempts: makes them.

    Attributes:
        made: the attempt; None while there is none.
    """

    def __init__(self, attempts: Attempts):
        self._attempts = attempts
        self.made: Attempt | None = None
        self._gap: Gap | None = None  # before an attempt that was taken back

    def launch(self, ids: Tensor, done: int, settle: Callable[[], object]) -> None:
        """Make the attempt at the step after `done` steps, if that can be before the last of these is settled.

        An error comes as if the last step had been settled before it.
        """
        self._gap = None
        if not self._attempts.go_ahead(done):
            return
        try:
            self.made = self._attempts(ids, done, first=False)
        except BaseException:
            if not collectives.is_distributed():  # other ranks may have had no error
                settle()
            raise

    def attempt(self, ids: Tensor, done: int, first: bool) -> Attempt:
        """Return the attempt at the step after `done` steps, which are settled: the one that stands, or a new one."""
        made, self.made = self.made, None
        if made is not None:
            return made
        attempt = self._attempts(ids, done, first)
        return attempt if self._gap is None else attempt._replace(gap=self._gap)

    def take_back(self) -> None:
        """Leave gradients, scales and random numbers as they were before the attempt, if there is one."""
        made, self.made = self.made, None
        if made is not None:
            self._gap = made.gap
            self._attempts.take_back(made)

    def give_way(self) -> None:
        """Take the attempt back for one who asks for the state while the last step is being settled.

        Raises RuntimeError in one of several ranks: the others would not make it again.
        """
        if self.made is not None and collectives.is_distributed():
            raise RuntimeError("the state cannot be asked for while a step is being settled: ask in a hook")
        self.take_back()

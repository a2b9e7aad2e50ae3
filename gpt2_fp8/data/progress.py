"""How far a run has trained, in the form that is saved: equal for any number of ranks, refused for other data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import distributed

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.data.deal import Deal
from gpt2_fp8.data.digests import Digests
from gpt2_fp8.data.lane import LaneState, lane_start
from gpt2_fp8.data.loaders import Cursor
from gpt2_fp8.data.units import DocumentCounts
from gpt2_fp8.runtime.collectives import rank_and_world

Fingerprint = dict[str, str | int]
OVERFIT = "overfit_batches"  # not in the fingerprints of earlier versions, which stand for 0


class Progress:
    """The steps trained, and where each lane stands. A rank updates its own lanes, and gathers the others'."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        deal: Deal,
        digests: Digests,
        validation: str | None = None,
    ):
        self.fingerprint = fingerprint
        self.digests = digests
        self.validation = validation  # a checksum of the validation sequences; None: there are none
        self._validated_before: str | None = None  # the same checksum of the run that this one continues
        self.deal = deal
        self.lanes: dict[str, LaneState] = {}
        self.begin()

    def begin(self) -> None:
        """Stand where a new run does. What is known of the text stays."""
        self.step = 0
        self.lanes = {str(lane): lane_start() for lane in range(self.deal.lanes)}

    def advance(self, cursor: Cursor) -> None:
        """Note that the step of this cursor was trained on."""
        self.step = cursor["step"]
        self.lanes.update(cursor["lanes"])
        self.digests.trained_on(cursor["units"])

    def state_dict(self) -> dict[str, Any]:
        """Return the progress for JSON, the same on every rank. Collective.

        Raises UserError if two ranks have read the same text differently.
        """
        rank, world = rank_and_world()
        own = set(map(str, self.deal.of_rank(rank, world)))
        lanes = {lane: state for lane, state in self.lanes.items() if lane in own}
        gathered: list[Any] = [(self.step, lanes, self.digests.known(), self.validation)]
        if world > 1:
            mine, gathered = gathered[0], [None] * world
            distributed.all_gather_object(gathered, mine)
        for step, lanes, *_ in gathered:
            assert step == self.step, f"ranks stand at the steps {[step for step, _ in gathered]}"
            self.lanes.update(lanes)
        assert all(self.lanes[lane] == state for _, lanes, *_ in gathered for lane, state in lanes.items()), (
            "ranks disagree"
        )
        self.digests.merge(table for _, _, table, _ in gathered)
        if any(validation != self.validation for *_, validation in gathered):
            raise UserError.of("the validation text changed while the ranks read it", "let it be, and start again")
        return {
            "fingerprint": dict(self.fingerprint),
            "step": self.step,
            "lanes": copy.deepcopy(self.lanes),
            "documents": self.documents().as_dict(),
            "digests": self.digests.state_dict(),
            "validation": self.validation or self._validated_before,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            UserError: its text or its order was another one, with every difference.
            ValueError, TypeError: it is not a state of this order.
        """
        if changed := list(self.other_settings(state)):
            raise UserError(changed)
        if state["lanes"].keys() != self.lanes.keys():
            raise ValueError(f"it has {len(state['lanes'])} lanes that are not the {len(self.lanes)} of this text")
        _documents(state["lanes"])  # raises now for counts that would not fit later
        self.digests.restore(state.get("digests"))
        self._validated_before = state.get("validation")
        self.step, self.lanes = state["step"], copy.deepcopy(state["lanes"])

    def other_settings(self, state: dict[str, Any]) -> Iterator[Problem]:
        """Return every setting in which the text or order of a `state_dict` differs from this one."""
        was, now = {OVERFIT: 0} | dict(state["fingerprint"]), dict(self.fingerprint)
        own, theirs = self.validation, state.get("validation")
        if own and theirs and all(was.get(key) == now[key] for key in ("data", "tokenizer", "n_positions")):
            was["validation"], now["validation"] = theirs, own  # otherwise it differs because the others do
        keys = [key for key in {**now, **was} if was.get(key) != now.get(key)]
        causes = [key for key in keys if key.partition(".")[0] != "lanes"]  # lanes follow from the others
        for key in causes or keys:
            cure = "set data.weights= back as they were" if key.startswith("weights.") else "set it back as it was"
            yield Problem(
                f"this run cannot be continued exactly: {_words(key)} was {was.get(key, 'nothing')}, "
                f"and is now {now.get(key, 'nothing')}",
                _CURES.get(key, cure) + "; or start a new run, with init_from=CHECKPOINT to keep the weights",
            )

    def documents(self) -> DocumentCounts:
        """Return the counts of all units that training has reached, over every epoch."""
        return _documents(self.lanes)


def named(fingerprint: Fingerprint) -> dict[str, str]:
    """Return a fingerprint under the names that a user has for its entries."""
    return {_words(key): str(value) for key, value in fingerprint.items()}


def _documents(lanes: dict[str, LaneState]) -> DocumentCounts:
    return sum((DocumentCounts(**lane["documents"]) for lane in lanes.values()), DocumentCounts())


def _words(key: str) -> str:
    """Return what a user calls an entry of a fingerprint."""
    about, _, rest = key.partition(".")
    name, _, detail = rest.partition(".")
    if not name:
        return _WORDS.get(key, key)
    return f"{_OF_A_SOURCE.get(detail or about, about)} of source {name}"


_OF_A_SOURCE = {
    "sources": "the text (its checksum)",
    "seed": "seed",
    "weights": "the weight (as a whole number)",
    "lanes": "lanes",
}
_WORDS = {
    "data": "the training text (its checksum)",
    "tokenizer": "the tokenizer (its checksum)",
    "n_positions": "model.n_positions",
    OVERFIT: "trainer.overfit_batches",
    "validation": "the validation text, on which the best is the best (its checksum),",
}
_CURES = {
    "tokenizer": "set data.tokenizer= back as it was",
    "validation": "set data.val_sequences= and what else chooses it back as they were, restore its files if they have "
    "changed, or do without: data.val_sequences=0",
}

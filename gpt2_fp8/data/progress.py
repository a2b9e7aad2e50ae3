"""How far a run has trained, in the form that is saved: equal for any number of ranks, refused for other data.

The fingerprint of a run's text is the names of its units and what decides their order. It does not say their content:
a digest of each unit's tokens does, from when a run first reads them. If a unit is read again (in a second epoch, after
a resume, on another rank, from the cache) its digest must be the same. The validation sequences have a checksum.
"""

from __future__ import annotations

import base64
import copy
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data.lane import Cursor, LaneState, lane_start
from gpt2_fp8.data.order import MAX_LANES, Deal
from gpt2_fp8.data.units import Corpus, DocumentCounts, Unit
from gpt2_fp8.runtime.collectives import everyones, rank_and_world

Fingerprint = dict[str, str | int]
OVERFIT = "overfit_batches"  # not in the fingerprints of earlier versions, which stand for 0
MOST_LANES = "most_lanes"  # of a source; in the fingerprint of a run that more than `MAX_LANES` ranks have begun
OF_SET = "validation."  # NAME; of `data.validation`, whose texts may come and go
TABLE_BYTES = 1 << 20  # of a checkpoint: a digest has 8 bytes, less with many units, and at least one
_SHOWN = 5

Table = npt.NDArray[np.uint64]  # by unit; 0: not known


class Digests:
    """The digests of a corpus' training units: of all that were read, and of those that were trained on."""

    def __init__(self, corpus: Corpus):
        self._units = corpus.train
        self._index = {unit: i for i, unit in enumerate(self._units)}
        self._width = max(1, min(8, TABLE_BYTES // len(self._units)))  # bytes of a digest
        self._read: Table = np.zeros(len(self._units), np.uint64)  # read here, or by the run that is continued
        self.saved: Table = np.zeros(len(self._units), np.uint64)  # the part of these that a checkpoint needs

    def check(self, unit: Unit, sha256: str) -> bool:
        """Return whether this is a training unit. Raises UserError if its tokens are not those that it had before."""
        if (i := self._index.get(unit)) is None:
            return False
        digest = int(sha256[: 2 * self._width], 16) or 1
        if self._read[i] not in (0, digest):
            raise _changed_error([unit])
        self._read[i] = digest
        return True

    def trained_on(self, units: Iterable[int]) -> None:
        """Note that training has reached these units, by their index among the training units. They were read."""
        for i in units:
            self.saved[i] = self._read[i]

    def merge(self, tables: Iterable[Table]) -> None:
        """Take over what other ranks know. Raises UserError if two have read a unit differently."""
        for table in tables:
            self._refuse_differences(table, self.saved)
            self.saved = np.where(table != 0, table, self.saved)

    def state_dict(self) -> dict[str, str]:
        """Return the digests for JSON."""
        content = self.saved.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : self._width].tobytes()
        return {"train": base64.b64encode(zlib.compress(content, 1)).decode()}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take over what `state_dict` gave; None: an earlier version saved none. Raises UserError if text differs."""
        if state is None:
            return
        content = zlib.decompress(base64.b64decode(state["train"]))
        wide = np.zeros((len(self._units), 8), np.uint8)
        wide[:, : self._width] = np.frombuffer(content, np.uint8).reshape(-1, self._width)
        table = wide.reshape(-1).view(np.uint64)
        self._refuse_differences(table, self._read)
        self._read = np.where(table != 0, table, self._read)
        self.saved = np.where(table != 0, table, self.saved)

    def _refuse_differences(self, one: Table, other: Table) -> None:
        if (changed := (one != 0) & (other != 0) & (one != other)).any():
            raise _changed_error([self._units[i] for i in np.flatnonzero(changed)])


def _changed_error(units: list[Unit]) -> UserError:
    more = f" (and {len(units) - _SHOWN} more)" if len(units) > _SHOWN else ""
    return UserError(
        Problem(
            "the text changed under this run: "
            f"{printable(unit.name)} (in {printable(unit.path)}) is not what it was when it was read first{more}",
            "restore it as it was, or start a new run, with init_from=CHECKPOINT to keep the weights",
        )
        for unit in units[:_SHOWN]
    )


class Progress:
    """The steps trained, and where each lane stands. A rank updates its own lanes, and gathers the others'."""

    def __init__(self, fingerprint: Fingerprint, deal: Deal, digests: Digests, validation: str | None = None):
        self.fingerprint = fingerprint
        self.deal, self.digests = deal, digests
        self.validation = validation  # a checksum of the validation sequences; None: there are none
        self._validated_before: str | None = None  # the same checksum of the run that this one continues
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
        """Return the progress for JSON, the same on every rank; UserError if two have read other text. Collective."""
        own = set(map(str, self.deal.of_rank(*rank_and_world())))
        lanes = {lane: state for lane, state in self.lanes.items() if lane in own}
        gathered = everyones((self.step, lanes, self.digests.saved, self.validation))
        for step, lanes, *_ in gathered:
            assert step == self.step, f"ranks stand at the steps {[step for step, *_ in gathered]}"
            self.lanes.update(lanes)
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
        """Continue from a `state_dict`. Raises UserError with every difference of its text and order."""
        if changed := list(self.find_differences(state)):
            raise UserError(changed)
        self.digests.restore(state.get("digests"))
        self._validated_before = state.get("validation")
        self.step, self.lanes = state["step"], copy.deepcopy(state["lanes"])

    def find_differences(self, state: dict[str, Any]) -> Iterator[Problem]:
        """Return every setting in which the text or order of a `state_dict` differs from this one."""
        left_out = {OVERFIT: 0, MOST_LANES: MAX_LANES}
        was, now = left_out | dict(state["fingerprint"]), left_out | self.fingerprint
        own, theirs = self.validation, state.get("validation")
        same_ids = all(was.get(key) == now[key] for key in ("tokenizer", "n_positions"))
        if own and theirs and same_ids and was.get("data") == now["data"]:
            was["validation"], now["validation"] = theirs, own  # otherwise it differs because the others do
        keys = [key for key in {**now, **was} if was.get(key) != now.get(key)]
        keys = [key for key in keys if not key.startswith(OF_SET) or (same_ids and key in was and key in now)]
        # Lanes follow from the others; the most is the checkpoint's, once that is restored.
        causes = [key for key in keys if key.partition(".")[0] not in ("lanes", MOST_LANES)]
        for key in causes or (() if MOST_LANES in keys else keys):
            yield Problem(
                f"this run cannot be continued exactly: {_LABELS.get(key, f'data.{key}')} was "
                f"{was.get(key, 'nothing')}, and is now {now.get(key, 'nothing')}",
                "set it back as it was; or start a new run, with init_from=CHECKPOINT to keep the weights",
            )

    def documents(self) -> DocumentCounts:
        """Return the counts of all units that training has reached, over every epoch."""
        return sum((DocumentCounts(**lane["documents"]) for lane in self.lanes.values()), DocumentCounts())


_LABELS = {  # what a user calls an entry of a fingerprint; the others are those of a mixture's sources
    "data": "the training text (its checksum)",
    "validation": "the validation text (its checksum)",
    "tokenizer": "the tokenizer (its checksum)",
    "n_positions": "model.n_positions",
    "global_batch_size": "global_batch_size",
    "seed": "seed",
    "lanes": "lanes",
    OVERFIT: "trainer.overfit_batches",
}


def most_lanes(fingerprint: Fingerprint) -> int:
    """Return the most lanes that a source of a run with this fingerprint may have."""
    return int(fingerprint.get(MOST_LANES, MAX_LANES))


def label(fingerprint: Fingerprint) -> dict[str, str]:
    """Return a fingerprint under the names that a user has for its entries."""
    return {_LABELS.get(key, key): str(value) for key, value in fingerprint.items()}

"""A digest of each unit's tokens when a run first read them, so that a change of the text is noticed.

The names, sizes and ranges of a corpus say which text a run uses, but not its content. A unit may be read again: in a
second epoch, after a resume, on another rank, or from the token cache. Its digest must then be the same, or the run
ends. Text that was not read before cannot have changed for the run. The validation text is not here: its sequences
have a checksum (`progress`).
"""

from __future__ import annotations

import base64
import logging
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data.units import Corpus, Unit

log = logging.getLogger(__name__)

TABLE_BYTES = 1 << 20  # of a checkpoint; with more units than that, one byte for each
DIGEST_BYTES = 8  # of a unit's digest; with n units at most TABLE_BYTES / n
_SHOWN = 5

Table = npt.NDArray[np.uint64]  # by unit; 0: not known


class Digests:
    """The digests of a corpus' training units: of all that were read, and of those that were trained on."""

    def __init__(self, corpus: Corpus):
        self._units = corpus.train
        self._index = {unit: i for i, unit in enumerate(self._units)}
        self._width = _width(len(self._units))
        self._read: Table = np.zeros(len(self._units), np.uint64)  # read here, or by the run that is continued
        self._saved: Table = np.zeros(len(self._units), np.uint64)  # the part of these that a checkpoint needs

    def check(self, unit: Unit, sha256: str) -> None:
        """Compare a unit that was read. Raises UserError if its tokens are not the ones that it had before."""
        if (i := self._index.get(unit)) is None:
            return
        digest = int(sha256[: 2 * self._width], 16) or 1
        if self._read[i] not in (0, digest):
            raise _changed([unit])
        self._read[i] = digest

    def trained_on(self, units: Iterable[int]) -> None:
        """Note that training has reached these units, by their index among the training units. They were read."""
        for i in units:
            self._saved[i] = self._read[i]

    def known(self) -> Table:
        """Return the part of a checkpoint's table that this rank knows."""
        return self._saved

    def merge(self, tables: Iterable[Table]) -> None:
        """Take over what the other ranks know. Raises UserError if two have read a unit differently."""
        for table in tables:
            self._refuse((table != 0) & (self._saved != 0) & (table != self._saved))
            self._saved = np.where(table != 0, table, self._saved)

    def state_dict(self) -> dict[str, str]:
        """Return the digests for JSON."""
        return {"train": _pack(self._saved, self._width)}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Compare this run's text with what `state_dict` gave; None: an earlier version has saved no digests.

        Raises:
            UserError: some text that was already read here is another text (one problem a unit).
            ValueError: this is not a state of this corpus.
        """
        if state is None:
            log.warning("data: an earlier version wrote this checkpoint, without digests of its text: "
                        "what was read before it cannot be compared")  # fmt: skip
            return
        if "train" not in state:
            raise ValueError("the digests of its text are missing")
        table = _unpack(state["train"], len(self._units))
        self._refuse((table != 0) & (self._read != 0) & (table != self._read))
        self._read = np.where(table != 0, table, self._read)
        self._saved = np.where(table != 0, table, self._saved)

    def _refuse(self, changed: npt.NDArray[np.bool_]) -> None:
        if changed.any():
            raise _changed([self._units[i] for i in np.flatnonzero(changed)])


def _width(n_units: int) -> int:
    """Return the number of bytes of a digest if there are `n_units` units."""
    return max(1, min(DIGEST_BYTES, TABLE_BYTES // max(n_units, 1)))


def _pack(table: Table, width: int) -> str:
    content = table.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    return base64.b64encode(zlib.compress(content, 1)).decode()  # compressed, units that were not read take no room


def _unpack(text: str, n_units: int) -> Table:
    """Return the table that `_pack` was given. Raises ValueError for text that is not of `n_units` units."""
    width = _width(n_units)
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(base64.b64decode(text, validate=True), n_units * width + 1)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"the digests of its text are damaged: {error}") from error
    if len(content) != n_units * width:
        raise ValueError(f"it has digests of another number of units than {n_units}")
    table = np.zeros((n_units, 8), np.uint8)
    table[:, :width] = np.frombuffer(content, np.uint8).reshape(n_units, width)
    return table.reshape(-1).view("<u8").astype(np.uint64)


def _changed(units: list[Unit]) -> UserError:
    remedy = (
        "restore it as it was; or start a new run under another run_name, with init_from=CHECKPOINT to keep the weights"
    )
    more = f" (and {len(units) - _SHOWN} more)" if len(units) > _SHOWN else ""
    return UserError(
        Problem(
            "the text changed under this run: "
            f"{printable(unit.name)} (in {printable(unit.path)}) is not what it was when it was read first{more}",
            remedy,
        )
        for unit in units[:_SHOWN]
    )

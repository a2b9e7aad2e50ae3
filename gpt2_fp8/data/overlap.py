"""Whether one source of a mixture trains on text that another one validates with, however each names the file."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from functools import cache

from gpt2_fp8.config import globs
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.data.units import Unit

_File = tuple[str, str]  # its path without links, and its version
_Group = tuple[str, str, float]  # a source, which documents are its units', and the fraction that decides


def check(trained: Iterable[Unit], held_out: Iterable[Unit]) -> None:
    """Compare what all sources train on with what they validate with. Raises UserError for each file of both."""
    real = cache(globs.real)
    files: dict[_File, dict[_Group, list[Unit]]] = defaultdict(lambda: defaultdict(list))
    for unit in held_out:
        files[real(unit.path), unit.version][unit.source, unit.side, unit.val_fraction].append(unit)
    for groups in files.values():
        for units in groups.values():
            units.sort(key=_stop)
    mixed_up = {
        (unit.path, unit.source, units[0].source)
        for unit in (trained if files else ())
        for units in files.get((real(unit.path), unit.version), {}).values()
        if units[0].source != unit.source and _has_text_of(units, unit)
    }
    if mixed_up:
        causes = (f"source {one} trains on {path}, and source {other} validates with it"
                  for path, one, other in sorted(mixed_up))  # fmt: skip
        raise UserError(Problem(cause, "leave it out of one of the two") for cause in causes)


def _has_text_of(held_out: list[Unit], unit: Unit) -> bool:
    """Return whether held-out units of one group of a file, sorted, have text of a training unit of the file.

    Documents are split by their content. So those that one source trains on are none of a fraction that is not larger.
    """
    first = held_out[0]
    if (unit.side, first.side) == ("train", "val") and first.val_fraction <= unit.val_fraction:
        return False
    at = bisect_left(held_out, unit.start + 1, key=_stop)  # the first that does not end before the unit begins
    return at < len(held_out) and held_out[at].start < _stop(unit)


def _stop(unit: Unit) -> int:
    """Return where a unit ends. That of a whole file or module has no range, and begins and ends at 0."""
    return max(unit.stop, unit.start + 1)

"""What each source of a run gives to its text: its units in their order, its lanes, and its validation sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import DataSourceLost, Problem, UserError
from gpt2_fp8.config.mixture import as_named
from gpt2_fp8.data.corpus_check import check_trainable
from gpt2_fp8.data.deal import Deal, Turns
from gpt2_fp8.data.mixed_deal import MixedDeal, column_count, lanes_of_share
from gpt2_fp8.data.mixing import Mixing
from gpt2_fp8.data.order import Order, lane_count
from gpt2_fp8.data.prefetch import UnitPool
from gpt2_fp8.data.reader import UnitReader
from gpt2_fp8.data.units import Corpus, Unit

_File = tuple[str, str]  # its path without links, and its version
_Group = tuple[str, str, float]  # a source, which documents are its units', and the fraction that decides


def check(trained: Iterable[Unit], held_out: Iterable[Unit]) -> None:
    """Compare what all sources train on with what they validate with. Raises UserError for each file of both."""
    real = cache(disk.real_path)
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


@dataclass(frozen=True)
class Part:
    """One source of a run's text, as it was asked for. The only source of a run has no name."""

    reader: UnitReader
    seed: int  # of its order
    val_sequences: int
    name: str = ""
    weight: int = 1


@dataclass(frozen=True)
class Strand:
    """One source of a run's text: its units in their order, and where they and its lanes begin among all sources'."""

    part: Part
    corpus: Corpus
    order: Order
    first_unit: int
    first_lane: int

    @property
    def name(self) -> str:
        """Return the source's name; the only source of a run has none."""
        return self.part.name

    def numbers(self) -> range:
        """Return the numbers of its lanes."""
        return range(self.first_lane, self.first_lane + self.order.lanes)


def corpus_of(part: Part) -> Corpus:
    """Find the units of a source. They have its name, by which `MixedReader` reads them."""
    with told_of(part.name):
        corpus: Corpus = part.reader.source.corpus()
    if not part.name:
        return corpus
    train, val = ([replace(unit, source=part.name) for unit in units] for units in (corpus.train, corpus.val))
    return Corpus(train, val, corpus.about)


def together(parts: list[Part], corpora: list[Corpus]) -> Corpus:
    """Return the corpus of a run: its only source's, or the units of all sources in turn.

    Raises UserError if a source would train on a file that another one validates with.
    """
    if len(corpora) == 1:
        return corpora[0]
    trained = [unit for corpus in corpora for unit in corpus.train]
    scored = (corpus.val for part, corpus in zip(parts, corpora, strict=True) if part.val_sequences)
    check(trained, chain.from_iterable(scored))
    about: dict[str, str | int] = {"kind": "mixture", "sources": ", ".join(part.name for part in parts)}
    return Corpus(trained, [unit for corpus in corpora for unit in corpus.val], about)


def twisted(parts: list[Part], corpora: list[Corpus], pool: UnitPool, size: int, n_positions: int) -> list[Strand]:
    """Order the units of every source, after a check that each has enough text. `size`: of the global batch.

    Raises UserError for a source that has not.
    """
    strands: list[Strand] = []
    first_unit = first_lane = 0
    for part, corpus in zip(parts, corpora, strict=True):
        units = corpus.train
        with told_of(part.name):
            if not units:
                check_trainable(units, pool, n_positions)  # raises
            lanes = lane_count(size, len(units))
            if len(parts) > 1:
                whole = sum(other.weight for other in parts)
                lanes = lanes_of_share(column_count(size), len(units), part.weight, whole)
            order = Order(part.seed, len(units), lanes)
            check_trainable([units[i] for i in order.epoch(0)], pool, n_positions)
        strands.append(Strand(part, corpus, order, first_unit, first_lane))
        first_unit, first_lane = first_unit + len(units), first_lane + lanes
    return strands


def deal_of(strands: list[Strand], size: int, seed: int) -> Deal:
    """Return the deal of the sequences of global batches of `size` to the lanes of all sources."""
    if len(strands) == 1:
        return Turns(strands[0].order.lanes, size)
    mixing = Mixing([strand.part.weight for strand in strands], column_count(size), seed)
    return MixedDeal(mixing, [strand.order.lanes for strand in strands], size)


@contextmanager
def told_of(name: str) -> Iterator[None]:
    """Enter a context in which a source is looked at: its errors then name it, and its keys as they are typed."""
    try:
        yield
    except UserError as error:
        if not name:
            raise
        raise UserError(as_named(problem, name) for problem in error.problems) from error
    except DataSourceLost as error:
        if not name:
            raise
        raise DataSourceLost(f"source {name}: {error}") from error

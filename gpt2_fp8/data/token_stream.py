"""The text of one run, found, checked and put in order: what its batches are cut from, and how far it was used."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from gpt2_fp8.config.data_schema import FilesData, TextOfARun, as_named, as_of_set, sources_of, with_sources
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data.lane import Batches, Lane, lane_start
from gpt2_fp8.data.order import MAX_LANES
from gpt2_fp8.data.progress import MOST_LANES, OF_SET, OVERFIT, Digests, Progress, most_lanes
from gpt2_fp8.data.reader import Readers
from gpt2_fp8.data.sources import (
    SourceStream,
    ValidatedText,
    build_reader,
    build_sets,
    build_streams,
    deal_lanes,
    join_corpora,
    naming_source,
)
from gpt2_fp8.data.tokenizer import Tokenizer, Tokens, fingerprint
from gpt2_fp8.data.units import DocumentCounts, TokenisedUnit, Unit
from gpt2_fp8.data.workers import UnitPool
from gpt2_fp8.runtime.collectives import rank_and_world

log = logging.getLogger(__name__)

MOST_HELD_OUT = 0.5  # of a text, where the part that was asked for is too short


class ValidationTooShort(UserError):
    """What is held out does not make one sequence."""


class TokenStream:
    """Reads units in one order, whatever the number of ranks and workers. Its state says how far training has come.

    Args:
        config, encoding: the `data` group and its tokenizer.
        n_positions, global_batch_size: as of the run.
        overfit_batches: steps whose batches are trained on again and again; 0: the whole text is.
        plugins: modules that worker processes import before they read.
        on_read: is given each unit that was read, and its side, "training" or "validation".
        must_keep: a unit that the cache cannot take is an error.
        ranks: that begin the run; None: as many as there are.

    Attributes: `corpus`, `streams` (what each source gives), `deal`, `pool` (reads units), `progress`, `val`, the
    validation's ids of each source that has any, [sequences, n_positions + 1], and `sets`, those of `data.validation`.

    Raises UserError if the text is missing, unreadable or too short, and DataSourceLost if its source does not answer.
    """

    def __init__(
        self,
        config: TextOfARun,
        encoding: Tokenizer,
        n_positions: int,
        global_batch_size: int,
        overfit_batches: int = 0,
        *,
        plugins: tuple[str, ...] = (),
        on_read: Callable[[Unit, TokenisedUnit, str], None] | None = None,
        must_keep: bool = False,
        ranks: int | None = None,
    ):
        self.n_positions, self.overfit_batches = n_positions, overfit_batches
        self._global_batch_size, self._seed, self._tokenizer = global_batch_size, config.seed, fingerprint(encoding)
        early: list[tuple[Unit, TokenisedUnit, str]] = []  # read before it is known how much is held out
        found = False

        def note(unit: Unit, tokenised: TokenisedUnit) -> None:
            side = "training" if self._digests.check(unit, tokenised.sha256) else "validation"
            if on_read is not None and found:
                on_read(unit, tokenised, side)
            elif on_read is not None:
                early.append((unit, tokenised, side))

        def open_pool(streams: list[SourceStream], sets: list[ValidatedText]) -> UnitPool:
            early.clear()
            self.corpus = join_corpora(streams)
            self._digests = Digests(self.corpus)
            readers = {text.name: replace(text.reader, must_keep=must_keep) for text in [*streams, *sets]}
            return UnitPool(Readers(readers, plugins), config.num_workers, note)

        self.streams, self.pool, self.val = find_text(config, encoding, n_positions, open_pool)
        self.sets = {name: self.val.pop(name) for name in config.validation}
        found = True
        for unit, tokenised, side in early:
            assert on_read is not None
            on_read(unit, tokenised, side)
        val = [*self.val.values()]
        self._checksum = hashlib.sha256(np.concatenate(val).tobytes()).hexdigest() if val else None
        self._deal_lanes(max(MAX_LANES, ranks or rank_and_world()[1]))
        for stream in self.streams:
            said = ", ".join(f"{name} {value}" for name, value in stream.corpus.about.items())
            named = f"{stream.name}, {self._share(stream):.4%} of the sequences: " if stream.name else ""
            counts = len(stream.corpus.train), stream.order.lanes, len(self.val.get(stream.name, ()))
            log.info("data: %s%s; %d units, %d lanes, %d validation sequences", named, said, *counts)
        for name, ids in self.sets.items():
            log.info("data: validation.%s: %d sequences", name, len(ids))

    def _deal_lanes(self, most: int) -> None:
        """Stand at the start of the text, in up to `most` lanes of each source."""
        self.streams, self.deal = deal_lanes(self.streams, self._global_batch_size, self._seed, most)
        self.progress = Progress(self._fingerprint(most), self.deal, self._digests, self._checksum)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of `progress`, in the lanes of its run. Raises as `Progress.restore`."""
        if (most := most_lanes(state["fingerprint"])) != most_lanes(self.progress.fingerprint):
            self._deal_lanes(most)
        self.progress.restore(state)

    def _fingerprint(self, most_lanes: int) -> dict[str, str | int]:
        """Return what decides the text and its order."""
        about: dict[str, str | int] = {
            "data": self.corpus.identity(),
            "tokenizer": self._tokenizer,
            "n_positions": self.n_positions,
            "global_batch_size": self._global_batch_size,
            "seed": self._seed,
            "lanes": self.deal.lanes,
            OVERFIT: self.overfit_batches,
            **{f"{OF_SET}{name}": hashlib.sha256(ids.tobytes()).hexdigest() for name, ids in self.sets.items()},
        }
        if most_lanes > MAX_LANES:
            about[MOST_LANES] = most_lanes
        if len(self.streams) > 1:
            about["sources"] = len(self.streams)
            for stream in self.streams:
                about[f"sources.{stream.name}"] = stream.corpus.identity()
                about[f"sources.{stream.name}.seed"] = stream.order.seed
                about[f"weights.{stream.name}"] = stream.weight
                about[f"lanes.{stream.name}"] = stream.order.lanes
        return about

    def _share(self, stream: SourceStream) -> float:
        """Return a source's share of the sequences."""
        return stream.weight / sum(other.weight for other in self.streams)

    def batches(self, from_start: bool = False) -> tuple[int, Batches]:
        """Return the steps done, and this rank's batches from there on; with `from_start`, the very first ones."""
        rank, world = rank_and_world()
        mine = self.deal.of_rank(rank, world)
        ahead = 1 + self.pool.num_workers // len(mine)  # work for every worker, even where lanes are few
        lanes = {}
        for number in mine:
            stream = next(stream for stream in self.streams if number in stream.lanes())
            lanes[number] = Lane(
                number - stream.first_lane, stream.order, stream.corpus.train, self.pool, self.n_positions,
                lane_start() if from_start else self.progress.lanes[str(number)], ahead, stream.first_unit,
            )  # fmt: skip
        done = 0 if from_start else self.progress.step
        return self.progress.step, Batches(lanes, self.deal, self.n_positions, rank, world, done)

    def report(self) -> dict[str, Any]:
        """Describe, in plain values, the source, the documents that training has come to, and this rank's reading."""
        report: dict[str, Any] = {
            "source": dict(self.corpus.about),
            "units": len(self.corpus.train),
            "documents": self.progress.documents().as_dict(),
            "reading": asdict(self.pool.counts),
        }
        if used := self.tokens_used():
            report["sources"] = {
                stream.name: {
                    **stream.corpus.about,
                    "units": len(stream.corpus.train),
                    "share": self._share(stream),
                    "tokens": used[stream.name][0],
                    "epochs": used[stream.name][1],
                }
                for stream in self.streams
            }
        return report

    def tokens_used(self) -> dict[str, tuple[int, float]]:
        """Return the tokens and the passes that training has used of each source of a mixture.

        Passes are counted in units, over the lanes that this rank reads. Repeated batches begin none: they stay 0.
        """
        if len(self.streams) == 1:
            return {}
        sequences = self.deal.sequences(self.progress.step, self.overfit_batches)
        mine = set(self.deal.of_rank(*rank_and_world()))
        found = {}
        for stream, count in zip(self.streams, sequences, strict=True):
            lanes = {number: self.progress.lanes[str(number)] for number in stream.lanes() if number in mine}
            passes = [
                lane["epoch"] + lane["position"] / stream.order.length(number - stream.first_lane)
                for number, lane in lanes.items()
            ]
            found[stream.name] = count * self.n_positions, round(sum(passes) / len(passes), 4)
        return found


def find_text(
    config: TextOfARun,
    encoding: Tokenizer,
    n_positions: int,
    open_pool: Callable[[list[SourceStream], list[ValidatedText]], UnitPool],
) -> tuple[list[SourceStream], UnitPool, dict[str, Tokens]]:
    """Return the streams of a run's text, what reads their units, and each validation, [sequences, n_positions + 1].

    Where `val_fraction` of small files is too short for one sequence, more is held out. Raises as `TokenStream`.
    """
    while True:
        streams, val = build_streams(config, encoding), {}
        sets = build_sets(config, encoding)
        pool = open_pool(streams, sets)
        try:
            for text in [*streams, *sets]:
                with naming_source(text.name, as_named if isinstance(text, SourceStream) else as_of_set):
                    if isinstance(text, SourceStream):
                        check_trainable([text.corpus.train[i] for i in text.order.epoch(0)], pool, n_positions)
                    if count := text.val_sequences:
                        val[text.name] = read_validation(text.corpus.val, pool, n_positions, count)
            return streams, pool, val
        except ValidationTooShort:
            pool.close()
            more = hold_out_more(config, text.name, encoding, n_positions)
            if more is None:
                raise
            config = more
        except BaseException:
            pool.close()
            raise


def hold_out_more(config: TextOfARun, name: str, encoding: Tokenizer, n_positions: int) -> TextOfARun | None:
    """Double the part of a source's files that is held out until it makes one sequence; None: half of them does not."""
    sources = dict(sources_of(config))
    source = sources.get(name)
    while isinstance(source, FilesData) and not source.val_files and 0 < source.val_fraction < MOST_HELD_OUT:
        source = replace(source, val_fraction=min(2 * source.val_fraction, MOST_HELD_OUT))
        reader, tokens = build_reader(source, encoding), 0
        for unit in reader.source.corpus().val:
            tokens += len(reader(unit)[0].tokens)
            if tokens > n_positions:
                log.warning("data: too little text for one validation sequence; held out now: data.val_fraction=%g",
                            source.val_fraction)  # fmt: skip
                return with_sources(config, [*(sources | {name: source}).values()])
    return None


def check_trainable(units: list[Unit], pool: UnitPool, n_positions: int) -> None:
    """Read `units` until they make one block. Raises UserError if they do not, or the first is in another encoding."""
    tokens, counts = 0, DocumentCounts()
    for done, unit in enumerate(units):
        tokenised = pool.take(pool.ask(unit))
        if tokenised.replaced and not done:
            share = f"{tokenised.replaced:.2%} of the characters"
            raise UserError.of(f"{printable(unit.name)}: {share} are no UTF-8", "convert its file to UTF-8")
        tokens, counts = tokens + len(tokenised.tokens), counts + tokenised.counts
        if tokens > n_positions:
            return
    skipped = counts.describe_odd()
    raise UserError.of(
        f"the training text is too short: {tokens} tokens in {counts.read} documents"
        f"{f' (and {skipped})' if skipped else ''}, but one sequence takes model.n_positions + 1 = {n_positions + 1}"
    )


def read_validation(units: list[Unit], pool: UnitPool, n_positions: int, count: int) -> Tokens:
    """Return the first `count` blocks of `units`: [<= count, n_positions + 1].

    Raises ValidationTooShort if there is not one.
    """
    wanted = count * n_positions + 1
    parts: list[Tokens] = []
    length = 0
    for tokenised in pool.read(units, f"reading {count:,} validation sequences, units"):
        parts.append(tokenised.tokens)
        length += len(tokenised.tokens)
        if length >= wanted:
            break
    n_blocks = min(count, (length - 1) // n_positions)
    if n_blocks < 1:
        cause = f"the validation text is too short: {length} tokens in {len(units)} units, but one sequence takes "
        raise ValidationTooShort.of(
            f"{cause}model.n_positions + 1 = {n_positions + 1}",
            "hold out more (data.val_fraction, data.val_files), or do without: data.val_sequences=0",
        )
    tokens = np.concatenate(parts)
    starts = np.arange(n_blocks)[:, None] * n_positions
    return tokens[starts + np.arange(n_positions + 1)]

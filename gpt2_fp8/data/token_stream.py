"""The text of one run, found, checked and put in order: what its batches are cut from, and how far it was used."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data.documents import TokenisedUnit
from gpt2_fp8.data.lane import Batches, Lane, lane_start
from gpt2_fp8.data.mixing import MixedDeal
from gpt2_fp8.data.prefetch import UnitPool
from gpt2_fp8.data.progress import OVERFIT, Digests, Progress
from gpt2_fp8.data.reader import MixedReader
from gpt2_fp8.data.sources import (
    Part,
    SourceStream,
    build_deal,
    find_units,
    join_corpora,
    naming_source,
    order_units,
)
from gpt2_fp8.data.units import Corpus, DocumentCounts, Tokens, Unit, little_endian
from gpt2_fp8.runtime.collectives import rank_and_world

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shape:
    """What decides the training batches beside their text.

    Attributes:
        n_positions: tokens of context; sequences have one more, the last target.
        global_batch_size: sequences per optimizer step over all ranks; a multiple of their number.
        seed: of the order; of several sources, of the mixing.
        overfit_batches: steps whose batches are trained on again and again; 0: the whole text is.
    """

    n_positions: int
    global_batch_size: int
    seed: int
    overfit_batches: int = 0


class TokenStream:
    """Reads units in one order, whatever the number of ranks and workers. Its state says how far training has come.

    Args:
        parts: the sources, each with its reader; several have names, by which they are sorted.
        num_workers: processes that read ahead; 0: this one reads.
        shape: of the batches.
        tokenizer: its fingerprint.
        on_read: is given each unit that was read, and its side, "training" or "validation".

    Attributes: `corpus`, `streams` (what each source gives), `deal`, `pool` (reads units), `progress`, and `val`, the
    validation's ids by source, int [sequences, n_positions + 1], of the sources that have any.

    Raises UserError if the text is missing, unreadable or too short, and DataSourceLost if its source does not answer.
    """

    def __init__(
        self,
        parts: list[Part],
        num_workers: int,
        shape: Shape,
        tokenizer: str,
        on_read: Callable[[Unit, TokenisedUnit, str], None] | None = None,
    ):
        self.shape = shape
        corpora = [find_units(part) for part in parts]
        self.corpus = join_corpora(parts, corpora)
        digests = Digests(self.corpus)

        def note(unit: Unit, tokenised: TokenisedUnit) -> None:
            is_training = digests.check(unit, tokenised.sha256)
            if on_read is not None:
                on_read(unit, tokenised, "training" if is_training else "validation")

        readers = {part.name: part.reader for part in parts}
        only = parts[0].reader
        reader = only if len(parts) == 1 else MixedReader(readers, only.plugins)
        self.pool = UnitPool(reader, num_workers, note)
        self.val: dict[str, Tokens] = {}
        try:
            self.streams = self._order(parts, corpora)
            for part, corpus in zip(parts, corpora, strict=True):
                if part.val_sequences:
                    with naming_source(part.name):
                        self.val[part.name] = read_validation(
                            corpus.val, self.pool, shape.n_positions, part.val_sequences
                        )
        except BaseException:
            self.pool.close()
            raise
        self.deal = build_deal(self.streams, shape.global_batch_size, shape.seed)
        val = [little_endian(blocks) for blocks in self.val.values()]
        checksum = hashlib.sha256(np.concatenate(val).tobytes()).hexdigest() if val else None
        self.progress = Progress(self._fingerprint(tokenizer), self.deal, digests, checksum)
        self._log()

    def _order(self, parts: list[Part], corpora: list[Corpus]) -> list[SourceStream]:
        """Order the units of every source, after a check that each has enough text."""
        for part, corpus in zip(parts, corpora, strict=True):
            with naming_source(part.name):
                if not corpus.train:
                    check_trainable([], self.pool, self.shape.n_positions)  # raises
        streams = order_units(parts, corpora, self.shape.global_batch_size)
        for stream in streams:
            with naming_source(stream.name):
                units = [stream.corpus.train[i] for i in stream.order.epoch(0)]
                check_trainable(units, self.pool, self.shape.n_positions)
        return streams

    def _fingerprint(self, tokenizer: str) -> dict[str, str | int]:
        """Return what decides the text and its order."""
        shape = self.shape
        about: dict[str, str | int] = {
            "data": self.corpus.identity(),
            "tokenizer": tokenizer,
            "n_positions": shape.n_positions,
            "global_batch_size": shape.global_batch_size,
            "seed": shape.seed,
            "lanes": self.deal.lanes,
            OVERFIT: shape.overfit_batches,
        }
        if len(self.streams) > 1:
            about["sources"] = len(self.streams)
            for stream in self.streams:
                about[f"sources.{stream.name}"] = stream.corpus.identity()
                about[f"sources.{stream.name}.seed"] = stream.part.seed
                about[f"weights.{stream.name}"] = stream.part.weight
                about[f"lanes.{stream.name}"] = stream.order.lanes
        return about

    def _log(self) -> None:
        """Log what was found."""
        for stream in self.streams:
            units, lanes, sequences = len(stream.corpus.train), stream.order.lanes, len(self.val.get(stream.name, ()))
            about = ", ".join(f"{name} {value}" for name, value in stream.corpus.about.items())
            named = f"{stream.name}, {float(self._share(stream)):.4%} of the sequences: " if stream.name else ""
            log.info("data: %s%s; %d units, %d lanes, %d validation sequences", named, about, units, lanes, sequences)

    def _share(self, stream: SourceStream) -> Fraction:
        """Return a source's share of the sequences."""
        return Fraction(stream.part.weight, sum(other.part.weight for other in self.streams))

    def batches(self, from_start: bool = False) -> tuple[int, Batches]:
        """Return the steps done, and this rank's batches from there on; with `from_start`, the very first ones."""
        rank, world = rank_and_world()
        mine = self.deal.of_rank(rank, world)
        ahead = 1 + self.pool.num_workers // len(mine)  # work for every worker, even where lanes are few
        lanes = {}
        for number in mine:
            stream = next(stream for stream in self.streams if number in stream.lanes())
            lanes[number] = Lane(
                number - stream.first_lane, stream.order, stream.corpus.train, self.pool, self.shape.n_positions,
                lane_start() if from_start else self.progress.lanes[str(number)], ahead, stream.first_unit,
            )  # fmt: skip
        done = 0 if from_start else self.progress.step
        return self.progress.step, Batches(lanes, self.deal, self.shape.n_positions, rank, world, done)

    def report(self) -> dict[str, Any]:
        """Describe, in plain values, the source, the documents that training has come to, and this rank's reading."""
        return {
            "source": dict(self.corpus.about),
            "units": len(self.corpus.train),
            "documents": self.progress.documents().as_dict(),
            "reading": asdict(self.pool.counts),
            **({"sources": self._sources()} if len(self.streams) > 1 else {}),
        }

    def used(self) -> dict[str, tuple[int, float]]:
        """Return the tokens and the passes that training has used of each source of a mixture.

        Passes are counted in units, over the lanes that this rank reads. Repeated batches begin none: they stay 0.
        """
        if not isinstance(self.deal, MixedDeal):
            return {}
        sequences = self.deal.sequences(self.progress.step, self.shape.overfit_batches)
        mine = set(self.deal.of_rank(*rank_and_world()))
        found = {}
        for stream, count in zip(self.streams, sequences, strict=True):
            lanes = {number: self.progress.lanes[str(number)] for number in stream.lanes() if number in mine}
            passes = [
                lane["epoch"] + lane["position"] / stream.order.length(number - stream.first_lane)
                for number, lane in lanes.items()
            ]
            found[stream.name] = count * self.shape.n_positions, round(sum(passes) / len(passes), 4)
        return found

    def _sources(self) -> dict[str, dict[str, Any]]:
        used = self.used()
        return {
            stream.name: {
                **stream.corpus.about,
                "units": len(stream.corpus.train),
                "share": float(self._share(stream)),
                "tokens": used[stream.name][0],
                "epochs": used[stream.name][1],
            }
            for stream in self.streams
        }

    def say_documents(self) -> None:
        """Log what was skipped or mended, if anything was."""
        counts = self.progress.documents().as_dict()
        odd = {name: count for name, count in counts.items() if count and name != "read"}
        if odd:
            log.info("data: of %d documents: %s", counts["read"], ", ".join(f"{n} {name}" for name, n in odd.items()))


def check_trainable(units: list[Unit], pool: UnitPool, n_positions: int) -> None:
    """Read `units` until they make one block.

    Raises UserError if the first is in another encoding than UTF-8, or all of them make less than one block.
    """
    tokens, counts = 0, DocumentCounts()
    for done, unit in enumerate(units):
        tokenised = pool.take(pool.ask(unit))
        if tokenised.replaced and not done:
            share = f"{tokenised.replaced:.2%} of the characters"
            raise UserError.of(f"{printable(unit.name)}: {share} are no UTF-8", "convert its file to UTF-8")
        tokens, counts = tokens + len(tokenised.tokens), counts + tokenised.counts
        if tokens > n_positions:
            return
    skipped = ", ".join(f"{n} {name}" for name, n in counts.as_dict().items() if n and name != "read")
    raise UserError.of(
        f"the training text is too short: {tokens} tokens in {counts.read} documents"
        f"{f' (and {skipped})' if skipped else ''}, but one sequence takes model.n_positions + 1 = {n_positions + 1}"
    )


def read_validation(units: list[Unit], pool: UnitPool, n_positions: int, count: int) -> Tokens:
    """Return the first `count` blocks of `units` in natural order: [<= count, n_positions + 1], uint16 or uint32.

    Raises UserError if there is not even one.
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
        raise UserError.of(
            f"the validation text is too short: {length} tokens in {len(units)} units, but one sequence takes "
            f"model.n_positions + 1 = {n_positions + 1}",
            "hold out more (data.val_fraction, data.val_files), or do without: data.val_sequences=0",
        )
    tokens = np.concatenate(parts)
    starts = np.arange(n_blocks)[:, None] * n_positions
    return tokens[starts + np.arange(n_positions + 1)]

"""The text of one run, found, checked and put in order: what its batches are cut from, and how far it was used."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.data.corpus_check import validation_blocks
from gpt2_fp8.data.digests import Digests
from gpt2_fp8.data.ids import Tokens, little_endian
from gpt2_fp8.data.lane import Lane, LaneState, lane_start
from gpt2_fp8.data.mixed_deal import MixedDeal
from gpt2_fp8.data.packing import Batches
from gpt2_fp8.data.prefetch import UnitPool
from gpt2_fp8.data.progress import OVERFIT, Progress
from gpt2_fp8.data.reader import MixedReader, Reader
from gpt2_fp8.data.strands import Part, Strand, corpus_of, deal_of, together, told_of, twisted
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

    Attributes: `corpus`, `strands` (what each source gives), `deal`, `pool` (reads units), `progress`, and `val`, the
    validation's ids by source, int [sequences, n_positions + 1], of the sources that have any.

    Raises UserError if the text is missing, unreadable or too short, and DataSourceLost if its source does not answer.
    """

    def __init__(self, parts: list[Part], num_workers: int, shape: Shape, tokenizer: str):
        self.shape = shape
        corpora = [corpus_of(part) for part in parts]
        self.corpus = together(parts, corpora)
        digests = Digests(self.corpus)
        self.pool = UnitPool(_reader(parts), num_workers, digests)
        self.val: dict[str, Tokens] = {}
        try:
            self.strands = twisted(parts, corpora, self.pool, shape.global_batch_size, shape.n_positions)
            for part, corpus in zip(parts, corpora, strict=True):
                if part.val_sequences:
                    with told_of(part.name):
                        found = validation_blocks(corpus.val, self.pool, shape.n_positions, part.val_sequences)
                    self.val[part.name] = found
        except RunError:
            self.pool.close()
            raise
        self.deal = deal_of(self.strands, shape.global_batch_size, shape.seed)
        decides: dict[str, str | int] = {
            "data": self.corpus.identity(),
            "tokenizer": tokenizer,
            "n_positions": shape.n_positions,
            "global_batch_size": shape.global_batch_size,
            "seed": shape.seed,
            "lanes": self.deal.lanes,
            OVERFIT: shape.overfit_batches,
            **_mixed(self.strands),
        }
        val = [little_endian(blocks) for blocks in self.val.values()]
        checksum = hashlib.sha256(np.concatenate(val).tobytes()).hexdigest() if val else None
        self.progress = Progress(decides, self.deal, digests, checksum)
        self._say()

    def _say(self) -> None:
        """Log what was found."""
        world = rank_and_world()[1]
        for strand in self.strands:
            units, lanes, sequences = len(strand.corpus.train), strand.order.lanes, len(self.val.get(strand.name, ()))
            about = ", ".join(f"{name} {value}" for name, value in strand.corpus.about.items())
            named = f"{strand.name}, {float(self._share(strand)):.4%} of the sequences: " if strand.name else ""
            log.info("data: %s%s; %d units, %d lanes, %d validation sequences", named, about, units, lanes, sequences)
            if world > lanes and not strand.name:
                log.warning("data: %d units are few for %d ranks: some read the same text, and each uses its own "
                            "sequences of it; more and smaller files make reading faster", units, world)  # fmt: skip

    def _share(self, strand: Strand) -> Fraction:
        """Return a source's share of the sequences."""
        return Fraction(strand.part.weight, sum(other.part.weight for other in self.strands))

    def batches(self, vocab_size: int, from_start: bool) -> tuple[int, Batches]:
        """Return the steps done, and this rank's batches from there on; with `from_start`, the very first ones."""
        rank, world = rank_and_world()
        mine = self.deal.of_rank(rank, world)
        ahead = self.ahead(len(mine))
        cut = {}
        for strand in self.strands:
            for number in set(mine) & set(strand.numbers()):
                state = lane_start() if from_start else self.progress.lanes[str(number)]
                cut[number] = self._lane(strand, number, state, ahead)
        cut = {number: cut[number] for number in mine}
        begun = 0 if from_start else self.progress.step
        return self.progress.step, Batches(cut, self.deal, self.shape.n_positions, rank, world, vocab_size, begun)

    def ahead(self, lanes: int) -> int:
        """Return how many units each of so many lanes asks for before it needs them."""
        return 1 + self.pool.num_workers // lanes  # work for every worker, even where lanes are few

    def _lane(self, strand: Strand, number: int, state: LaneState, ahead: int) -> Lane:
        units, index = strand.corpus.train, number - strand.first_lane
        return Lane(
            index, strand.order, units, self.pool, self.shape.n_positions, state, ahead, strand.first_unit
        )  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` stands.

        Raises:
            UserError: the text, the tokenizer or what else makes the order is not what it was (every difference).
            TypeError, ValueError: it is no state of this order.
        """
        self.progress.restore(state)
        for strand in self.strands:  # or it would come to light in the midst of training
            for number in strand.numbers():
                at = self.progress.lanes[str(number)]["position"]
                if at >= (units := strand.order.length(number - strand.first_lane)):
                    raise ValueError(f"lane {number} stands at its unit {at}, counted from 0, of {units}")

    def report(self) -> dict[str, Any]:
        """Describe, in plain values, the source, the documents that training has come to, and this rank's reading."""
        return {
            "source": dict(self.corpus.about),
            "units": len(self.corpus.train),
            "documents": self.progress.documents().as_dict(),
            "reading": asdict(self.pool.counts),
            **({"sources": self._sources()} if len(self.strands) > 1 else {}),
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
        for strand, count in zip(self.strands, sequences, strict=True):
            lanes = {number: self.progress.lanes[str(number)] for number in strand.numbers() if number in mine}
            passes = [
                lane["epoch"] + lane["position"] / strand.order.length(number - strand.first_lane)
                for number, lane in lanes.items()
            ]
            found[strand.name] = count * self.shape.n_positions, round(sum(passes) / len(passes), 4)
        return found

    def _sources(self) -> dict[str, dict[str, Any]]:
        used = self.used()
        return {
            strand.name: {
                **strand.corpus.about,
                "units": len(strand.corpus.train),
                "share": float(self._share(strand)),
                "tokens": used[strand.name][0],
                "epochs": used[strand.name][1],
            }
            for strand in self.strands
        }

    def say_documents(self) -> None:
        """Log what was skipped or mended, if anything was."""
        counts = self.progress.documents().as_dict()
        odd = {name: count for name, count in counts.items() if count and name != "read"}
        if odd:
            log.info("data: of %d documents: %s", counts["read"], ", ".join(f"{n} {name}" for name, n in odd.items()))


def _reader(parts: list[Part]) -> Reader:
    """Return what reads the units of all sources."""
    if len(parts) == 1:
        return parts[0].reader
    return MixedReader({part.name: part.reader for part in parts}, parts[0].reader.plugins)


def _mixed(strands: list[Strand]) -> dict[str, str | int]:
    """Return what decides the order of a mixture beside what decides that of a single source."""
    if len(strands) == 1:
        return {}
    about: dict[str, str | int] = {"sources": len(strands)}
    for strand in strands:
        about[f"sources.{strand.name}"] = strand.corpus.identity()
        about[f"sources.{strand.name}.seed"] = strand.part.seed
        about[f"weights.{strand.name}"] = strand.part.weight
        about[f"lanes.{strand.name}"] = strand.order.lanes
    return about

"""The text of one run, found, checked and put in order: what its batches are cut from, and how far it was used."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import asdict, dataclass
from typing import Any

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.data.corpus_check import check_trainable, validation_blocks
from gpt2_fp8.data.digests import Digests
from gpt2_fp8.data.ids import Tokens, little_endian
from gpt2_fp8.data.order import Order, lane_count
from gpt2_fp8.data.packing import Batches, Lane, lane_start, lanes_of
from gpt2_fp8.data.prefetch import UnitPool
from gpt2_fp8.data.progress import Progress
from gpt2_fp8.data.reader import UnitReader
from gpt2_fp8.data.units import Corpus
from gpt2_fp8.runtime.collectives import rank_and_world

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shape:
    """What decides the training batches beside their text.

    Attributes:
        n_positions: tokens of context; sequences have one more, the last target.
        global_batch_size: sequences per optimizer step over all ranks; a multiple of their number.
        seed: of the order.
    """

    n_positions: int
    global_batch_size: int
    seed: int


class TokenStream:
    """Reads units in one order, whatever the number of ranks and workers. Its state says how far training has come.

    Args:
        reader: of the source's units.
        num_workers: processes that read ahead; 0: this one reads.
        shape: of the batches.
        val_sequences: how many sequences a validation scores.
        tokenizer: its fingerprint.

    Attributes: `corpus`, `order`, `pool` (reads units), `progress`, and `val`, the validation's ids, int
    [val_sequences, n_positions + 1]; None without a validation.

    Raises UserError if the text is missing, unreadable or too short, and DataSourceLost if its source does not answer.
    """

    def __init__(self, reader: UnitReader, num_workers: int, shape: Shape, val_sequences: int, tokenizer: str):
        self.shape = shape
        self.corpus: Corpus = reader.source.corpus()
        digests = Digests(self.corpus)
        self.pool = UnitPool(reader, num_workers, digests)
        self.val: Tokens | None = None
        try:
            self.order = self._ordered()
            if val_sequences:
                self.val = validation_blocks(self.corpus.val, self.pool, shape.n_positions, val_sequences)
        except RunError:
            self.pool.close()
            raise
        decides: dict[str, str | int] = {
            "data": self.corpus.identity(),
            "tokenizer": tokenizer,
            "n_positions": shape.n_positions,
            "global_batch_size": shape.global_batch_size,
            "seed": shape.seed,
            "lanes": self.order.lanes,
        }
        val = None if self.val is None else hashlib.sha256(little_endian(self.val).tobytes()).hexdigest()
        self.progress = Progress(decides, self.order.lanes, shape.global_batch_size, digests, val)
        self._say()

    def _ordered(self) -> Order:
        """Order the units that were found, after a check that they have enough text."""
        units = self.corpus.train
        if not units:
            check_trainable(units, self.pool, self.shape.n_positions)  # raises
        order = Order(self.shape.seed, len(units), lane_count(self.shape.global_batch_size, len(units)))
        check_trainable([units[i] for i in order.epoch(0)], self.pool, self.shape.n_positions)
        return order

    def _say(self) -> None:
        """Log what was found."""
        units, sequences = len(self.corpus.train), 0 if self.val is None else len(self.val)
        about = ", ".join(f"{name} {value}" for name, value in self.corpus.about.items())
        log.info("data: %s; %d units, %d lanes, %d validation sequences", about, units, self.order.lanes, sequences)
        if (world := rank_and_world()[1]) > self.order.lanes:
            log.warning("data: %d units are few for %d ranks: some read the same text, and each uses its own sequences "
                        "of it; more and smaller files make reading faster", units, world)  # fmt: skip

    def batches(self, vocab_size: int, from_start: bool) -> tuple[int, Batches]:
        """Return the steps done, and this rank's batches from there on; with `from_start`, the very first ones."""
        rank, world = rank_and_world()
        lanes, size, positions = self.order.lanes, self.shape.global_batch_size, self.shape.n_positions
        mine = lanes_of(rank, world, lanes, size)
        ahead = 1 + self.pool.num_workers // len(mine)  # work for every worker, even where lanes are few
        cut = {}
        for index in mine:
            state = lane_start() if from_start else self.progress.lanes[str(index)]
            cut[index] = Lane(index, self.order, self.corpus.train, self.pool, positions, state, ahead)
        return self.progress.step, Batches(cut, lanes, size, positions, rank, world, vocab_size)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` stands.

        Raises:
            UserError: the text, the tokenizer or what else makes the order is not what it was (every difference).
            TypeError, ValueError: it is no state of this order.
        """
        self.progress.restore(state)
        for lane, saved in self.progress.lanes.items():  # or it would come to light in the midst of training
            if saved["position"] >= (units := self.order.length(int(lane))):
                raise ValueError(f"lane {lane} stands at its unit {saved['position']}, counted from 0, of {units}")

    def report(self) -> dict[str, Any]:
        """Describe, in plain values, the source, the documents that training has come to, and this rank's reading."""
        return {
            "source": dict(self.corpus.about),
            "units": len(self.corpus.train),
            "documents": self.progress.documents().as_dict(),
            "reading": asdict(self.pool.counts),
        }

    def say_documents(self) -> None:
        """Log what was skipped or mended, if anything was."""
        counts = self.progress.documents().as_dict()
        odd = {name: count for name, count in counts.items() if count and name != "read"}
        if odd:
            log.info("data: of %d documents: %s", counts["read"], ", ".join(f"{n} {name}" for name, n in odd.items()))

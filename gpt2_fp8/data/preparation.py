"""Text that is read before training: into the token cache, or to count the tokens of a pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpt2_fp8.config.data_schema import MixtureData, TextData, TextOfARun, TokenFilesData, sets_of, sources_of
from gpt2_fp8.data.files import TokenFilesSource
from gpt2_fp8.data.reader import Readers
from gpt2_fp8.data.sources import SourceStream, ValidatedText
from gpt2_fp8.data.token_stream import TokenStream, find_text
from gpt2_fp8.data.tokenizer import load_tokenizer
from gpt2_fp8.data.units import DocumentCounts, TokenisedUnit, Unit
from gpt2_fp8.data.workers import ProgressLog, UnitPool


class Job(NamedTuple):
    """What is to be prepared. `steps`: only what so many steps need; None: the whole text. The others: as of a run."""

    data: TextOfARun
    n_positions: int
    global_batch_size: int
    steps: int | None
    plugins: tuple[str, ...] = ()
    ranks: int = 1


@dataclass
class Kept:
    """What the cache has of one side of a source. `size`: bytes of its tokens on the disk."""

    units: int = 0
    tokens: int = 0
    size: int = 0
    documents: DocumentCounts = field(default_factory=DocumentCounts)


class Preparation:
    """Reads what a run of a job will read, as the run does, and so fills the cache. It may be interrupted at any time.

    Attributes:
        kept: what the cache has of each (source's name, side) so far. The only source of a run has the name "".
    """

    def __init__(self, job: Job):
        self.job = job
        self.kept: dict[tuple[str, str], Kept] = {}
        self.tokenised = 0  # units that were tokenised here; the others were in the cache
        self._seen: set[Unit] = set()
        # Of these the tokens are kept: files of ids are read as they are.
        texts = [*sources_of(job.data), *sets_of(job.data)]
        self._cached = {name for name, source in texts if isinstance(source, TextData)}

    def run(self) -> None:
        """Read what is needed. Raises as `TokenStream` does, and OSError if the cache's disk takes no more."""
        job = self.job
        text = TokenStream(
            job.data, load_tokenizer(job.data.tokenizer), job.n_positions, job.global_batch_size,
            plugins=job.plugins, on_read=self._note, must_keep=True, ranks=job.ranks,
        )  # fmt: skip
        try:
            if job.steps is None:
                self._read_all(text)
            else:
                self._read_steps(text, job.steps)
        finally:
            text.pool.close()
            self.tokenised = text.pool.counts.units - text.pool.counts.cache_hits

    def _read_all(self, text: TokenStream) -> None:
        units: list[Unit] = []
        for stream in text.streams:
            units += [*stream.corpus.train, *(stream.corpus.val if stream.val_sequences else ())]
        rest = [unit for unit in units if unit.source in self._cached and unit not in self._seen]
        for _ in text.pool.read(rest, "reading the text, units"):
            pass

    def _read_steps(self, text: TokenStream, steps: int) -> None:
        """Cut the batches of `steps` steps, up to the step after which every unit was read, and read what is ahead."""
        whole = len(self._seen | {unit for unit in text.corpus.train if unit.source in self._cached})
        batches = text.batches()[1]
        progress = ProgressLog("reading the text of steps", steps)
        for step in range(steps):
            if len(self._seen) == whole:
                break
            progress.at(step)
            batches.next()
        for lane in batches.lanes.values():
            lane.finish()

    def _note(self, unit: Unit, tokenised: TokenisedUnit, side: str) -> None:
        if unit in self._seen or unit.source not in self._cached:
            return
        self._seen.add(unit)
        kept = self.kept.setdefault((unit.source, side), Kept())
        kept.units += 1
        kept.tokens += len(tokenised.tokens)
        kept.size += tokenised.tokens.nbytes + tokenised.ends.nbytes
        kept.documents += tokenised.counts


def count_ids(config: TokenFilesData) -> int:
    """Count the ids of the files to train on, by their sizes. Raises UserError if one is missing or damaged."""
    source = TokenFilesSource(config.train_files, config.val_files, config.headerless)
    return sum(map(source.count, source.corpus().train))


def tokens_a_pass(config: TextOfARun, n_positions: int, plugins: tuple[str, ...] = ()) -> int:
    """Count the tokens of the training text that `config` names: it reads all of it. Raises as `TokenStream` does."""
    assert not isinstance(config, MixtureData), "each of its sources has passes of its own"

    if isinstance(config, TokenFilesData) and (tokens := count_ids(config)) > n_positions:
        return tokens

    def open_pool(streams: list[SourceStream], _: list[ValidatedText]) -> UnitPool:
        return UnitPool(Readers({stream.name: stream.reader for stream in streams}, plugins), config.num_workers)

    alone = replace(config, validation={})
    (stream,), pool, _ = find_text(alone, load_tokenizer(config.tokenizer), n_positions, open_pool)
    try:
        read = pool.read(stream.corpus.train, "counting the tokens of an epoch, units")
        return sum(len(unit.tokens) for unit in read)
    finally:
        pool.close()

"""Fills the token cache with what a run will read, by the run's own reading, and counts what is in it."""

from __future__ import annotations

import logging
import shutil
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpt2_fp8.config.data_schema import TextOfARun
from gpt2_fp8.config.shown import duration
from gpt2_fp8.data.documents import TokenisedUnit
from gpt2_fp8.data.ids import dtype_of
from gpt2_fp8.data.needed import Walk, walks
from gpt2_fp8.data.prefetch import Ticket
from gpt2_fp8.data.progress_log import EVERY_SECONDS, FIRST_SECONDS
from gpt2_fp8.data.sources import build_parts
from gpt2_fp8.data.strands import told_of
from gpt2_fp8.data.token_stream import Shape, TokenStream
from gpt2_fp8.data.tokenizer import fingerprint, load_tokenizer
from gpt2_fp8.data.units import DocumentCounts, Unit

log = logging.getLogger(__name__)


class Job(NamedTuple):
    """What is to be prepared. `steps`: only what so many steps need; None: the whole text. `plugins`: as of a run."""

    data: TextOfARun
    n_positions: int
    global_batch_size: int
    steps: int | None
    plugins: tuple[str, ...] = ()


@dataclass
class Kept:
    """What the cache has of one side of a source. `size`: bytes on the disk."""

    units: int = 0
    tokens: int = 0
    size: int = 0
    documents: DocumentCounts = field(default_factory=DocumentCounts)


class Preparation:
    """Reads every unit of a job once, into the cache; what is there already is checked, and not tokenised again.

    Attributes:
        kept: what the cache has of each (source's name, side) so far. The only source of a run has the name "".

    Raises:
        UserError: the text is missing, unreadable, too short for the run, or changes meanwhile.
        DataSourceLost: its source does not answer.
        OSError: the cache's disk takes no more.
    """

    def __init__(self, job: Job):
        encoding = load_tokenizer(job.data.tokenizer)
        parts = build_parts(job.data, encoding, job.plugins)
        parts = [replace(part, reader=replace(part.reader, must_keep=True)) for part in parts]
        shape = Shape(job.n_positions, job.global_batch_size, job.data.seed)
        self._text = TokenStream(parts, job.data.num_workers, shape, fingerprint(encoding))
        self._walks = walks(self._text, job.steps)
        self._all = sum(len(rest) for rest in {id(walk.rest): walk.rest for walk in self._walks}.values())
        self._id_bytes = dtype_of(encoding.n_vocab).itemsize
        self.kept: dict[tuple[str, str], Kept] = {}

    @property
    def tokenised(self) -> int:
        """Return how many units were tokenised here; the others were in the cache."""
        counts = self._text.pool.counts
        return counts.units - counts.cache_hits

    def run(self) -> None:
        """Read what is needed. It may be interrupted at any time: the cache has whole units only."""
        self._say_room()
        try:
            self._read()
        finally:
            self._text.pool.close()

    def _read(self) -> None:
        pool, lengths = self._text.pool, dict[Unit, int]()
        asked: deque[tuple[Walk, Ticket]] = deque()
        progress = _ProgressLog()
        while True:
            for walk in self._walks:
                asked.extend((walk, pool.ask(unit)) for unit in walk.next(lengths))
            if not asked:
                return
            walk, ticket = asked.popleft()
            with told_of(walk.strand.name):
                tokenised = pool.take(ticket)
            lengths[ticket.unit] = len(tokenised.tokens)
            self._note(walk, ticket.unit, tokenised)
            tokens = sum(kept.tokens for kept in self.kept.values())
            progress.at(len(lengths), tokens, self._done(len(lengths)), self.tokenised)

    def _note(self, walk: Walk, unit: Unit, tokenised: TokenisedUnit) -> None:
        cache = walk.strand.part.reader.cache
        assert cache is not None, "there is no walk without one"
        kept = self.kept.setdefault((walk.strand.name, walk.side), Kept())
        kept.units += 1
        kept.tokens += len(tokenised.tokens)
        kept.size += cache.size(replace(unit, source=""))
        kept.documents += tokenised.counts

    def _done(self, units: int) -> float:
        """Return which part of the work is done, at least: by tokens, or by units if nearly all are needed."""
        needed = sum(walk.tokens or 0 for walk in self._walks)
        by_tokens = sum(walk.part * (walk.tokens or 0) for walk in self._walks) / needed if needed else 0.0
        return max(by_tokens, units / self._all)

    def _say_room(self) -> None:
        """Log how much is to be kept, and how much room there is for it, if the number of tokens is known."""
        needed: dict[str, int] = {}
        read = {"training": 0, "validation": 0}
        for walk in self._walks:
            cache = walk.strand.part.reader.cache
            assert cache is not None, "there is no walk without one"
            folder = str(cache.folder)
            needed[folder] = needed.get(folder, 0) + (walk.tokens or 0)
            read[walk.side] += max((walk.tokens or 0) - 1, 0)  # each sequence's last target is the next one's first
        if sum(read.values()):
            log.info("data: the run trains on %s tokens, and validates on %s", *(f"{n:,}" for n in read.values()))
        for folder, tokens in needed.items():
            size, free = tokens * self._id_bytes, shutil.disk_usage(folder).free
            if tokens:
                level = logging.INFO if size < free else logging.WARNING
                log.log(level, "data: its tokens take %s MB in %s, unless its text is shorter; %s MB are free",
                        f"{size / 1e6:,.1f}", folder, f"{free / 1e6:,.0f}")  # fmt: skip


class _ProgressLog:
    """A line of the log every `EVERY_SECONDS`: how far it has come, how fast, and how long the rest will take."""

    def __init__(self) -> None:
        self._line = self._since = time.monotonic()
        self._next = self._line + FIRST_SECONDS
        self._tokens = self._tokenised = 0
        self._part = 0.0

    def at(self, units: int, tokens: int, part: float, tokenised: int) -> None:
        """Log, if a line is due. `part`: of the work, that is done; `tokenised`: units that were not in the cache."""
        now = time.monotonic()
        if tokenised and not self._tokenised:  # what was there goes faster, and says nothing of the rest
            self._tokenised, self._since, self._part = tokenised, now, part
        if now < self._next:
            return
        rate = (tokens - self._tokens) / (now - self._line)
        left = (1 - part) * (now - self._since) / (part - self._part) if part > self._part else None
        self._line, self._next, self._tokens = now, now + EVERY_SECONDS, tokens
        log.info("data: %s units, %s tokens, %.0f %%, %s tokens/s%s", f"{units:,}", f"{tokens:,}", 100 * part,
                 f"{rate:,.0f}", "" if left is None else f", left {duration(left)}")  # fmt: skip

"""From one unit to its tokens. This is what runs in a worker process."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Protocol

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.cache import UnitCache
from gpt2_fp8.data.documents import TokenisedUnit, of_ids, tokenise
from gpt2_fp8.data.ids import check_unit
from gpt2_fp8.data.retry import with_retries
from gpt2_fp8.data.tokenizer import load_tokenizer
from gpt2_fp8.data.tokenizer_files import FileTokenizer
from gpt2_fp8.data.units import DocumentCounts, IdSource, Source, Unit

log = logging.getLogger(__name__)


@dataclass
class WorkCounts:
    """What it took to read the units, in this process's lifetime."""

    units: int = 0
    cache_hits: int = 0
    retries: int = 0
    worker_deaths: int = 0


class Reader(Protocol):
    """What reads a unit, in any process. Picklable."""

    @property
    def plugins(self) -> tuple[str, ...]:
        """Return the user's modules that a worker process imports first."""
        ...

    def __call__(self, unit: Unit) -> tuple[TokenisedUnit, WorkCounts]:
        """Read `unit`."""
        ...


@dataclass(frozen=True)
class UnitReader:
    """Reads a unit's tokens from the cache, or from the source (with its retries) and into the cache.

    A source of ids has no cache: its files are as quick to read.
    """

    source: Source | IdSource
    tokenizer: str
    cache: UnitCache | None
    plugins: tuple[str, ...] = ()  # the user's modules, which a worker process imports too
    fingerprint: str | None = None  # the tokenizer's when the run began; None: whatever it is
    must_keep: bool = False  # a unit that the cache cannot take is an error, and not only read again in the next pass

    def __call__(self, unit: Unit) -> tuple[TokenisedUnit, WorkCounts]:
        """Read `unit`.

        Raises UserError or DataSourceLost if the source does. With `must_keep`, a text that changes while it is read is
        a UserError too, and a disk that takes no more an OSError.
        """
        if self.cache and (stored := self.cache.load(unit)):
            return stored, WorkCounts(units=1, cache_hits=1)
        tokenised, retries = with_retries(lambda: self._tokenise(unit), unit.name, self.source.waits)
        if self.cache and isinstance(self.source, Source):
            self._keep(self.cache, self.source, unit, tokenised)
        return tokenised, WorkCounts(units=1, retries=retries)

    def _keep(self, cache: UnitCache, source: Source, unit: Unit, tokenised: TokenisedUnit) -> None:
        """Store the unit, unless its text has changed since it was found. A failure is logged, or raised."""
        if not source.is_current(unit):
            if self.must_keep:
                raise UserError.of(f"{unit.name} changed while it was read", "let its file be, and start again")
            return
        try:
            cache.store(unit, tokenised)
        except OSError as error:
            if self.must_keep:
                raise OSError(error.errno, error.strerror or str(error), str(cache.folder)) from None
            log.warning("data: cannot keep a unit in data.cache_dir: %s", error)

    def _tokenise(self, unit: Unit) -> TokenisedUnit:
        counts = DocumentCounts()  # new for each attempt, so a failed one is not counted
        encoding = load_tokenizer(self.tokenizer)
        if isinstance(encoding, FileTokenizer) and self.fingerprint not in (None, encoding.sha256):
            raise UserError.of(
                f"data.tokenizer={self.tokenizer}: its file has changed since the run began",
                "restore it as it was, and continue with ckpt_path=last",
            )
        if isinstance(self.source, IdSource):
            return of_ids(self.source.read_ids(unit, encoding.n_vocab), encoding.eot_token)
        made = tokenise(self.source.read(unit, counts), unit, encoding, counts)
        check_unit(made.tokens, encoding.n_vocab, unit.name)  # the cache checks its own units
        return made


@dataclass(frozen=True)
class MixedReader:
    """Reads the units of several sources, each by the reader of its source's name."""

    readers: dict[str, UnitReader]
    plugins: tuple[str, ...] = ()

    def __call__(self, unit: Unit) -> tuple[TokenisedUnit, WorkCounts]:
        """Read `unit`, as its source knows it. Raises UserError or DataSourceLost if the source does."""
        return self.readers[unit.source](replace(unit, source=""))

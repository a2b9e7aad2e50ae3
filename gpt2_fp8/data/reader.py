"""From one unit to its tokens: from the cache, or from its source with retries. This runs in worker processes.

In the cache a unit is two files. `<key>.u16` (`<key>.u32` for more than 65,536 ids) has its tokens, followed by the
documents' ends as int64. `<key>.json` has the dtype, the number of tokens and of documents, the counts, and a sha256.
Both are written under a temporary name and then renamed, the JSON last, so that a writer that is killed never leaves
half a unit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from gpt2_fp8.config.errors import DataSourceLost, RunError, UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data.files import TokenFilesSource
from gpt2_fp8.data.tokenizer import dtype_of, load_tokenizer
from gpt2_fp8.data.units import DocumentCounts, Source, TokenisedUnit, Unit, of_ids, tokenise

log = logging.getLogger(__name__)

Result = TypeVar("Result")

FORMAT = "1"  # raise it when the same text gives other tokens, or when the layout changes
ABANDONED_SECONDS = 3600.0  # a temporary file that was not written to for so long has no writer

_random = random.SystemRandom()  # the seeded generator would give every rank the same numbers
# Errors that waiting cannot solve: the user's, ours, and lack of memory. All others (OSError, the errors of the HTTP
# client, of Arrow or of a decompressor) may pass.
_FINAL = (RunError, AssertionError, LookupError, TypeError, AttributeError, NameError, ImportError, MemoryError)


def with_retries(action: Callable[[], Result], what: str, waits: tuple[float, ...]) -> tuple[Result, int]:
    """Return the result of `action` and the number of failed attempts before it. Each attempt starts from nothing.

    Raises DataSourceLost if it still fails after the last of `waits`, in seconds. Each gets up to a quarter of jitter:
    the ranks and workers of a large run do not all try again at once.
    """
    failures = 0
    while True:
        try:
            return action(), failures
        except _FINAL:
            raise
        except Exception as error:
            said = f"{what} ({type(error).__name__}: {printable(str(error))[:300]})"
            if failures == len(waits):
                raise DataSourceLost(f"cannot read {said}, after {failures + 1} attempts") from error
            wait = waits[failures] * (1 + _random.random() / 4)
            failures += 1
            log.warning("cannot read %s; attempt %d in %.1f s", said, failures + 1, wait)
            time.sleep(wait)


@dataclass(frozen=True)
class UnitCache:
    """The cache in `folder` for one tokenizer. Any number of processes may use the same folder at once."""

    folder: Path
    tokenizer: str  # its fingerprint
    vocab_size: int  # the number of its ids

    def check(self) -> None:
        """Make the folder, and remove what killed writers have left. Raises UserError if it cannot be written to."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise UserError.of(f"cannot write to data.cache_dir={self.folder}: {error}") from error
        for path in self.folder.glob("*.tmp"):
            with suppress(OSError):  # another process may remove it too
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    def load(self, unit: Unit) -> TokenisedUnit | None:
        """Return the unit as it was stored; None if it is not there or is damaged. Damage is logged."""
        about_path, path = self._paths(unit)
        try:
            about = json.loads(about_path.read_bytes())
            content = path.read_bytes()
            if (sha256 := hashlib.sha256(content).hexdigest()) != about["sha256"]:
                raise ValueError("the checksum differs")
            tokens = np.frombuffer(content, dtype_of(self.vocab_size), count=about["tokens"])
            ends = np.frombuffer(content, np.int64, count=about["documents"], offset=tokens.nbytes)
            counts = DocumentCounts(**about["counts"])
            return TokenisedUnit(tokens, ends, counts, sha256, float(about.get("replaced", 0)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("data: the cached %s is damaged (%s) and is made again", path.name, error)
            return None

    def store(self, unit: Unit, tokenised: TokenisedUnit) -> None:
        """Keep the unit. Raises OSError if it cannot be written, as on a full disk; then there is none of it."""
        about = {
            "unit": unit.name,
            "dtype": tokenised.tokens.dtype.name,
            "tokens": len(tokenised.tokens),
            "documents": len(tokenised.ends),
            "counts": tokenised.counts.as_dict(),
            "sha256": tokenised.sha256,
            "replaced": tokenised.replaced,
        }
        about_path, path = self._paths(unit)
        write_whole(path, tokenised.tokens.tobytes() + tokenised.ends.tobytes())
        write_whole(about_path, json.dumps(about).encode())

    def _paths(self, unit: Unit) -> tuple[Path, Path]:
        path = self.folder / unit.digest(self.tokenizer, FORMAT)[:32]
        return path.with_suffix(".json"), path.with_suffix(f".u{8 * dtype_of(self.vocab_size).itemsize}")


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that other processes see all of it or none."""
    temporary = path.with_name(f"{_random.getrandbits(64):x}.tmp")  # by `tempfile` only its owner could read it
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@dataclass
class WorkCounts:
    """What it took to read the units, in this process's lifetime."""

    units: int = 0
    cache_hits: int = 0
    retries: int = 0
    worker_deaths: int = 0


@dataclass(frozen=True)
class UnitReader:
    """Reads a unit's tokens from the cache, or from the source (with its retries) and into the cache."""

    source: Source | TokenFilesSource
    tokenizer: str
    cache: UnitCache | None
    must_keep: bool = False  # a unit that the cache cannot take is an error, and not only read again in the next pass

    def __call__(self, unit: Unit) -> tuple[TokenisedUnit, WorkCounts]:
        """Read `unit`. Raises UserError or DataSourceLost if the source does; OSError if `must_keep`, and it cannot."""
        if self.cache and (stored := self.cache.load(unit)):
            return stored, WorkCounts(units=1, cache_hits=1)
        tokenised, retries = with_retries(lambda: self._tokenise(unit), unit.name, self.source.waits)
        if self.cache:
            try:
                self.cache.store(unit, tokenised)
            except OSError as error:
                if self.must_keep:
                    raise OSError(error.errno, error.strerror or str(error), str(self.cache.folder)) from None
                log.warning("data: cannot keep a unit in data.cache_dir: %s", error)
        return tokenised, WorkCounts(units=1, retries=retries)

    def _tokenise(self, unit: Unit) -> TokenisedUnit:
        encoding = load_tokenizer(self.tokenizer)
        if isinstance(self.source, TokenFilesSource):
            return of_ids(self.source.read_ids(unit, encoding.n_vocab), encoding.eot_token)
        counts = DocumentCounts()  # new for each attempt, so a failed one is not counted
        return tokenise(self.source.read(unit, counts), unit, encoding, counts)


@dataclass(frozen=True)
class Readers:
    """The readers of a run's sources, by name. `plugins`: the user's modules, which a worker process imports first."""

    by_source: dict[str, UnitReader]
    plugins: tuple[str, ...] = ()

    def __call__(self, unit: Unit) -> tuple[TokenisedUnit, WorkCounts]:
        """Read `unit`, as its source knows it. Raises what its `UnitReader` does."""
        return self.by_source[unit.source](replace(unit, source=""))

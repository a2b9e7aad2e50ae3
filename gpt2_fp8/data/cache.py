"""Tokenised units on disk. A later pass reads 2 or 4 bytes a token, and needs no network.

A unit is two files. `<key>.u16` has its tokens as little-endian uint16, followed by the documents' ends as int64. With
a vocabulary of more than 65,536 ids it is `<key>.u32`, and the tokens are uint32. `<key>.json` has the dtype, the
number of tokens and of documents, the counts, and a sha256.

Both are written under a temporary name and then renamed, the JSON last. So a writer that is killed never leaves half a
unit. The temporary file that it leaves is removed when a later run begins. A unit is made again if its checksum
differs, or if this tokenizer cannot have made it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.documents import TokenisedUnit
from gpt2_fp8.data.ids import dtype_of, little_endian
from gpt2_fp8.data.units import DocumentCounts, Unit

log = logging.getLogger(__name__)

FORMAT = "1"  # raise it when the same text gives other tokens, or when the layout changes
ABANDONED_SECONDS = 3600.0  # a temporary file that was not written to for so long has no writer


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
            raise UserError.of(
                f"cannot write to data.cache_dir={self.folder}: {error}", "name another folder, or data.cache_dir=null"
            ) from error
        for path in self.folder.glob("*.tmp"):
            with suppress(OSError):  # another process may remove it too
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    def load(self, unit: Unit) -> TokenisedUnit | None:
        """Return the unit as it was stored; None if it is not there or is damaged. Damage is logged."""
        path = self._path(unit)
        try:
            about = json.loads(_content(path.with_suffix(".json")))
            if (stated := about.get("dtype", "uint16")) != self._dtype.name:  # old entries do not state it
                raise ValueError(f"it has {stated!a:.40} tokens, but this vocabulary takes {self._dtype.name}")
            content = _content(path.with_suffix(self._suffix))
            if (sha256 := hashlib.sha256(content).hexdigest()) != about["sha256"]:
                raise ValueError("the checksum differs")
            tokens = np.frombuffer(content, dtype=self._dtype.newbyteorder("<"), count=about["tokens"])
            ends = np.frombuffer(content, dtype="<i8", count=about["documents"], offset=tokens.nbytes)
            if tokens.size and int(tokens.max()) >= self.vocab_size:
                raise ValueError(f"it has the token {tokens.max()} of a vocabulary of {self.vocab_size}")
            if np.any(np.diff(ends, prepend=0) <= 0) or (ends[-1] if ends.size else 0) != tokens.size:
                raise ValueError("its documents do not make up its tokens")
            return TokenisedUnit(
                tokens, ends, DocumentCounts(**about["counts"]), sha256, float(about.get("replaced", 0))
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("data: the cached %s is damaged (%s) and is made again", path.name, error)
            return None

    def store(self, unit: Unit, tokenised: TokenisedUnit) -> None:
        """Keep the unit. Raises OSError if it cannot be written, as on a full disk; then there is none of it."""
        assert tokenised.tokens.dtype == self._dtype, "the unit is of another vocabulary"
        content = little_endian(tokenised.tokens).tobytes() + tokenised.ends.astype("<i8").tobytes()
        about = {
            "unit": unit.name,
            "dtype": self._dtype.name,
            "tokens": len(tokenised.tokens),
            "documents": len(tokenised.ends),
            "counts": tokenised.counts.as_dict(),
            "sha256": tokenised.sha256,
            "replaced": tokenised.replaced,
        }
        path = self._path(unit)
        replace(path.with_suffix(self._suffix), content)
        replace(path.with_suffix(".json"), json.dumps(about).encode())

    def size(self, unit: Unit) -> int:
        """Return how many bytes the unit's two files have. Raises OSError if it is not there."""
        path = self._path(unit)
        return sum(path.with_suffix(suffix).stat().st_size for suffix in (self._suffix, ".json"))

    @property
    def _dtype(self) -> np.dtype[np.unsignedinteger]:
        return dtype_of(self.vocab_size)

    @property
    def _suffix(self) -> str:
        return f".u{8 * self._dtype.itemsize}"

    def _path(self, unit: Unit) -> Path:
        return self.folder / unit.digest(self.tokenizer, FORMAT)[:32]


def _content(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise ValueError("no regular file")
    return path.read_bytes()


def replace(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that other processes see all of it or none."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise

"""The list of a hub data set's files, kept on disk for the time when the hub is out of reach."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from gpt2_fp8.data.cache import replace

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listing:
    """The commit of a revision, and for each split its files and their number of shards."""

    commit: str
    files: dict[str, list[str]]
    shards: dict[str, int]

    @staticmethod
    def load(folder: Path | None, asked: list[str]) -> Listing | None:
        """Return what was stored for the same question; None if there is nothing, or nothing of this form."""
        if folder is None or not (path := _path(folder, asked)).is_file():
            return None
        try:
            listing = Listing(**json.loads(path.read_bytes()))
            listing._check()
            return listing
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            log.warning("data: %s is damaged (%s) and is not used", path, type(error).__name__)
            return None

    def store(self, folder: Path | None, asked: list[str]) -> None:
        """Keep the listing. A failure is logged; a later run without the hub then has none."""
        if folder is None:
            return
        try:
            replace(_path(folder, asked), json.dumps(asdict(self)).encode())
        except OSError as error:
            log.warning("data: cannot keep a listing in data.cache_dir: %s", error)

    def _check(self) -> None:
        """Check what was stored. Raises ValueError, TypeError or AttributeError if it is not a valid listing."""
        names = [name for paths in self.files.values() for name in paths]
        if not re.fullmatch(r"[0-9a-f]{40}", self.commit) or not {"train", "val"} <= self.files.keys():
            raise ValueError("the commit or the splits are invalid")
        if not all(name.isprintable() for name in names) or not self.shards.keys() <= self.files.keys():
            raise ValueError("the files are invalid")
        if not all(type(count) is int and 0 <= count < 1 << 24 for count in self.shards.values()):
            raise ValueError("the numbers of shards are invalid")


def _path(folder: Path, asked: list[str]) -> Path:
    return folder / f"hub-{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]}.json"

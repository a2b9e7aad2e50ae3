"""Whether a checkpoint holds exactly the bytes that were written. A process checks each file once."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint.errors import unreadable
from gpt2_fp8.checkpoint.manifest import digests, read_manifest

log = logging.getLogger(__name__)

# A file that was written again within the resolution of its time stamp would look unchanged.
_SETTLED_SECONDS = 2.0
_seen: set[tuple[int | str, ...]] = set()  # `_identity` of a file, and its digest


def verified(path: Path | str) -> dict[str, Any]:
    """Return the manifest of the checkpoint `path`, after comparing every file with its listed size and SHA-256.

    A file that this process has already read, and that has not changed since, is not read again. A checkpoint of
    version 1 has no digests: only its sizes are compared, and the log says so. Raises CheckpointError naming the files
    that differ.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if manifest["version"] == 1:
        log.warning("%s is of checkpoint format 1, without digests: its bytes cannot be checked", path)
        return manifest
    listed = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    try:
        before = {name: _identity(path / name) for name in listed}
        unseen = [name for name in listed if (*before[name], listed[name]) not in _seen]
        found, now = digests(path, unseen), time.time()
        after = {name: _identity(path / name) for name in unseen}
    except OSError as error:
        raise unreadable(path, f"a file of it cannot be read ({error})") from None
    if wrong := [name for name in unseen if found[name] != listed[name]]:
        raise unreadable(path, f"{', '.join(wrong)} was changed after it was written: its SHA-256 does not fit")
    for name in unseen:
        if before[name] == after[name] and now - max(before[name][-2:]) / 1e9 > _SETTLED_SECONDS:
            _seen.add((*before[name], listed[name]))
    return manifest


def _identity(path: Path) -> tuple[int, ...]:
    """Return device, inode, size and the times of the last change (of bytes, of anything) in ns."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

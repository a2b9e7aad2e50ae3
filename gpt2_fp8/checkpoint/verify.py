"""Whether a checkpoint holds exactly the bytes that were written. A process checks each file once."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint.digest import digests
from gpt2_fp8.checkpoint.errors import escaped, unreadable
from gpt2_fp8.checkpoint.manifest import read_manifest
from gpt2_fp8.config.bounded import regular_file

log = logging.getLogger(__name__)

# A file that was written again within the resolution of its time stamp would look unchanged.
_SETTLED_SECONDS = 2.0
_seen: set[tuple[int | str, ...]] = set()  # `_identity` of a file, and its digest
_warned: set[Path] = set()  # checkpoints of version 1


def verified(path: Path | str) -> dict[str, Any]:
    """Return the manifest of the checkpoint `path`, after comparing every file with its listed size and SHA-256.

    A file that this process has already read, and that has not changed since, is not read again. A checkpoint of
    version 1 has no digests: only its sizes are compared, and the log says so. Raises CheckpointError naming the files
    that differ.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if manifest["version"] == 1:
        _say_unchecked(path)
        return manifest
    listed = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    try:
        before = {name: _identity(path / name) for name in listed}
        unseen = [name for name in listed if (*before[name], listed[name]) not in _seen]
        found, now = digests(path, unseen), time.time()
        after = {name: _identity(path / name) for name in unseen}
    except OSError as error:
        raise unreadable(path, f"a file of it cannot be read ({error})") from None
    wrong = [name for name in unseen if found[name] != listed[name]]
    if wrong:
        differ = ", ".join(f"{name} has {found[name][:12]}... instead of {listed[name][:12]}..." for name in wrong)
        raise unreadable(path, f"it was changed after it was written: by SHA-256, {differ}")
    for name in unseen:
        if before[name] == after[name] and now - max(before[name][-2:]) / 1e9 > _SETTLED_SECONDS:
            _seen.add((*before[name], listed[name]))
    return manifest


def _identity(path: Path) -> tuple[int, ...]:
    """Return device, inode, size and the times of the last change (of bytes, of anything) in ns."""
    found = regular_file(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _say_unchecked(path: Path) -> None:
    if path not in _warned:
        _warned.add(path)
        name = escaped(str(path))
        log.warning("%s is of checkpoint format 1, without digests: whether its bytes changed cannot be checked", name)

"""Writing small files so that a crash or a power cut leaves the old one or the new one, never half. Stdlib only.

A run's folder may come from elsewhere. Nothing here follows a link in it, or waits for a pipe in it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import IO, Any

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def fsync(path: Path) -> None:
    """Ask the disk to keep a file's bytes, or the names in a folder. Raises OSError if it cannot."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, atomically and durably. After an OSError the old file is still there.

    Raises ValueError for a non-finite float: it is not JSON, and readers in other languages fail on it.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, atomically and durably. After an OSError the old file is still there."""
    temporary = path.with_name(f".{path.name}.tmp")
    with create(temporary) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            _replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    fsync(path.parent)


def create(path: Path) -> IO[str]:
    """Open a new file for text. It replaces what a killed process or a stranger left there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        put_aside(path)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666)
    return os.fdopen(descriptor, "w", encoding="utf-8", newline="")


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file, which `flags` may create, and return its descriptor. Raises OSError for anything else.

    A link is refused too.
    """
    try:
        descriptor = os.open(path, flags | _SAFE, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and path.is_symlink():
            raise OSError(error.errno, "it is a link, and links are not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def append(path: Path, content: bytes) -> None:
    """Append to a regular file, all or nothing. Raises OSError."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        try:
            while content:
                content = content[os.write(descriptor, content) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def put_aside(path: Path) -> Path:
    """Rename `path` to the first free of `NAME.aside-1`, `NAME.aside-2`, ..., and return it. Raises OSError."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.aside-{number}")):
        number += 1
    os.rename(path, aside)
    return aside


def _replace(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`. A folder at `path` is put aside first."""
    if path.is_dir() and not path.is_symlink():
        put_aside(path)
    os.replace(temporary, path)

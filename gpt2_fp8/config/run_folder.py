"""What is in a run's folder where the run writes its own files. Standard library only, and nothing made here stays.

The folder may come from elsewhere, or belong to somebody else. A run would write through a link, and wait for a pipe. A
file that cannot be opened would end it with a traceback.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show

TRIAL = b"\0" * 4096
_TRIAL_NAME, _TRIAL_SECONDS = ".write-test-", 60.0
FOLDERS = ("tensorboard", "tensorboard/train", "tensorboard/val", "checkpoints", "wandb")
REPLACED = ("summary.json", ".summary.json.tmp", "metrics.csv", "metrics.csv.tmp", "fp8.csv", "fp8.csv.tmp",
            "remote_runs.json", ".remote_runs.json.tmp")  # fmt: skip
WRITTEN_TO = (".lock", "tensorboard/hparams.yaml")
HYDRA = ("config.yaml", "hydra.yaml", "overrides.yaml")
SWEEP = ("multirun.yaml", "optimization_results.yaml")
_REMEDY = "remove it; hydra.run.dir=FOLDER puts a whole run elsewhere"


def check(folder: Path, log: str | None = None, settings: str | None = None) -> list[Problem]:
    """Find everything in `folder` that a run could not write, or would write through.

    `log` is the name of the log file. `settings` is the name of the folder with Hydra's files. Either is None if there
    is none. A folder that does not exist has nothing wrong.
    """
    if not folder.is_dir():
        return []
    hydra = [os.path.join(settings, name) for name in HYDRA] if settings else []
    folders = [folder, *(folder / name for name in (*FOLDERS, *([settings] if settings else [])))]
    files = [*REPLACED, *WRITTEN_TO, *([log] if log else []), *hydra]
    found: list[Problem] = []
    for path in folders[1:]:
        found += _named(path, _no_folder(path))
    found += [problem for name in files for problem in _named(folder / name, _no_file(folder / name))]
    if not found:
        appended = [folder / name for name in files if name not in REPLACED]
        found = [problem for path in appended for problem in _cannot_open(path)]
        found += [problem for path in folders if path.is_dir() for problem in cannot_write(path)]
    return found


def check_sweep(folder: Path) -> list[Problem]:
    """Find what a sweeper could not write in the folder of its sweep."""
    return [problem for name in SWEEP for problem in _named(folder / name, _no_file(folder / name))]


def cannot_write(folder: Path) -> Iterator[Problem]:
    """Report why no file can be made in an existing folder."""
    if reason := unwritable(folder):
        yield Problem(f"{show_path(folder)} cannot be written: {reason}", "make it writable, or choose another folder")


def unwritable(folder: Path) -> str | None:
    """Try to write into an existing folder, and return why that fails; None if it works.

    os.access is wrong on network filesystems. It also does not see that there is no byte or inode left.
    """
    try:
        _clear_trials(folder)
        with tempfile.TemporaryDirectory(prefix=_TRIAL_NAME, dir=folder) as trial:
            (Path(trial) / "file").write_bytes(TRIAL)
    except OSError as error:
        return error.strerror or str(error)
    return None


def no_folder(path: Path) -> str:
    """Say what is there instead of a folder, as part of a sentence."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return "is a link that leads nowhere, not a folder"
    return "is a pipe, not a folder" if stat.S_ISFIFO(mode) else "is a file, not a folder"


def _clear_trials(folder: Path) -> None:
    """Remove the trial folders of starts that were killed, except those that may be in use."""
    for trial in folder.glob(_TRIAL_NAME + "*"):
        with suppress(OSError):
            if time.time() - os.lstat(trial).st_mtime > _TRIAL_SECONDS:
                (trial / "file").unlink(missing_ok=True)
                trial.rmdir()


def umask() -> list[Problem]:
    """Check that this process's umask leaves the owner all rights to its files."""
    mask = os.umask(0o77)
    os.umask(mask)
    if not mask & 0o700:
        return []
    cause = f"the umask {mask:04o} keeps the owner out of the files and folders that a run makes"
    return [Problem(cause, "type `umask 022` before the command; or `umask 077`, so that nobody else reads them")]


def current() -> list[Problem]:
    """Check that the current folder exists: every relative path begins with it."""
    try:
        os.getcwd()
    except OSError as error:
        cause = f"the current folder is not there any more, or may not be looked at: {error.strerror}"
        return [Problem(cause, "cd into a folder that is there (`cd ~`), and type the command again")]
    return []


def temporary() -> list[Problem]:
    """Check that there is a folder for temporary files: torch and the data's worker processes need one."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        return [
            Problem(f"a temporary folder is needed: {error.strerror}", "TMPDIR=FOLDER before the command names one")
        ]
    return []


def show_path(path: Path) -> str:
    """Return a path for people: as it is, or quoted and escaped if a terminal would obey it."""
    return str(path) if str(path).isprintable() else show(str(path))


def _named(path: Path, reason: str | None) -> list[Problem]:
    return [Problem(f"{show_path(path)}: {reason}", _REMEDY)] if reason else []


def _no_file(path: Path) -> str | None:
    """Return why a run cannot write a file of that name, or None."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror
    if stat.S_ISREG(mode):
        return None
    return _what(mode) + ", where a run writes a file"


def _no_folder(path: Path) -> str | None:
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):  # the second: the folder above is said to be none
        return None
    except OSError as error:
        return error.strerror
    return None if stat.S_ISDIR(mode) else _what(mode) + ", where a run has a folder"


def _what(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "it is a link"
    return "it is a folder" if stat.S_ISDIR(mode) else "it is a file" if stat.S_ISREG(mode) else "it is no regular file"


def _cannot_open(path: Path) -> list[Problem]:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError:
        return []
    except OSError as error:
        return _named(path, f"it cannot be written: {error.strerror}")
    return []

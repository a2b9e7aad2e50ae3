"""What a checkpoint's folder says about itself, and whether it is complete.

Version 1 gave each file's size. Version 2 adds the SHA-256 of each file, and that of the manifest itself, so that no
changed bit goes unnoticed: `verify` compares the files with them. Version 3 renames keys of the state
(`files.upgrade`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpt2_fp8 import __version__
from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.runtime.programs import read_versions

log = logging.getLogger(__name__)

FORMAT = "gpt2_fp8 checkpoint"
VERSION = 3
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.safetensors"
AVERAGE = "average.safetensors"
SKELETON, MANIFEST = "state.json", "manifest.json"
_NAME = re.compile(r"step-([0-9]{8,15})|\.step-([0-9]{8,15})\.old")
SEAL = "sha256"  # the key of the manifest's own digest
# By the beginning of a tensor's path.
_PLACES = {"state_dict.": MODEL, "optimizer_states.": OPTIMIZER, "training_step.average.": AVERAGE, "": STATE}
_seen: set[tuple[int | str, ...]] = set()  # `_identity` of each file that was compared with its digest


class CheckpointError(UserError):
    """A folder that was named as a checkpoint cannot be read as one, or does not fit the run."""


def step_of(name: str) -> int | None:
    """Return the step of `step-00000004`, and of `.step-00000004.old`, which a killed writer has moved aside."""
    match = _NAME.fullmatch(name)
    return int(match[1] or match[2]) if match else None


def unreadable(path: Path, why: str) -> CheckpointError:
    """Return the error that says why the folder `path` is not a readable checkpoint."""
    remedy = "name the folder of a whole checkpoint: RUN/checkpoints/step-NNNNNNNN"
    return CheckpointError([Problem(f"{path} cannot be read as a checkpoint: {why}", remedy)])


def place(name: str) -> tuple[str, str]:
    """Return (file, key in that file) of a tensor named by its path in the checkpoint."""
    prefix = next(prefix for prefix in _PLACES if name.startswith(prefix))
    return _PLACES[prefix], name.removeprefix(prefix)


def describe(folder: Path, names: Iterable[str], step: int, precision: str | None) -> dict[str, Any]:
    """Return the manifest of a checkpoint of `step`, trained in `precision`, whose files `names` are in `folder`."""
    written_by = {name: version for name, version in read_versions().items() if version and name != "code"}
    sha256 = digests(folder, names)
    manifest: dict[str, Any] = {"format": FORMAT, "version": VERSION, "global_step": step}
    if precision is not None:
        manifest["precision"] = precision
    files = {name: {"size": (folder / name).stat().st_size, "sha256": sha256[name]} for name in sha256}
    manifest |= {"written_by": written_by, "files": files}
    return manifest | {SEAL: _own_digest(manifest)}


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return {name: SHA-256 in 64 hexadecimal digits} of files in `folder`, read in parallel, about 1.5 GB/s each."""
    names = list(names)
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashlib releases the GIL
        return dict(zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_digest(manifest: dict[str, Any]) -> str:
    """Return the digest of a manifest without its own: as JSON with sorted keys and no spaces."""
    rest = {key: value for key, value in manifest.items() if key != SEAL}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: Path | str) -> dict[str, Any]:
    """Return the manifest. It is unchanged, of a known format, and of the step in the folder's name.

    Every file that it lists is there at full length; `verify` checks the content. Raises CheckpointError.
    """
    path = Path(path)
    if not path.is_dir():
        raise unreadable(
            path, "it is a file, and checkpoints are folders" if path.exists() else "there is no such folder"
        )
    manifest = read_json(path, MANIFEST)
    try:
        _check(path, manifest)
        for name, entry in manifest["files"].items():
            if (found := (path / name).stat().st_size) != entry["size"]:
                raise unreadable(path, f"{name} has {found} bytes of {entry['size']}")
    except FileNotFoundError as error:
        raise unreadable(path, f"{Path(error.filename).name} is missing") from None
    except (OSError, AttributeError, KeyError, TypeError) as error:
        raise unreadable(path, f"{MANIFEST} does not hold what it should ({error!r})") from None
    return manifest


def is_checkpoint(path: Path | str) -> bool:
    """Return whether `path` is a checkpoint of a format that this version reads, with all files at full length."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def read_json(path: Path, name: str) -> Any:
    """Return the value in the JSON file `name` of the checkpoint `path`. Raises CheckpointError."""
    try:
        return disk.read_json(path / name)
    except FileNotFoundError:
        raise unreadable(path, f"it has no {name}") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, f"{name} cannot be read ({error})") from None


def _check(path: Path, manifest: dict[str, Any]) -> None:
    """Raise CheckpointError for a manifest that is not ours, was changed, or has a version not known here."""
    if manifest.get("format") != FORMAT:
        raise unreadable(path, f"{MANIFEST} is not one of a gpt2_fp8 checkpoint")
    if (version := manifest["version"]) > VERSION:
        raise CheckpointError.of(
            f"{path} is of checkpoint format {version}; this gpt2_fp8 {__version__} reads up to {VERSION}",
            f"use gpt2_fp8 {manifest['written_by']['gpt2_fp8']} or later",
        )
    if (version > 1 or SEAL in manifest) and _own_digest(manifest) != manifest[SEAL]:
        raise unreadable(path, f"{MANIFEST} was changed after it was written: its own SHA-256 does not fit")
    step = manifest["global_step"]
    if (named := step_of(path.name)) not in (step, None):
        raise unreadable(path, f"it is of step {step}, by its {MANIFEST}, and its name is that of step {named}")


def verify(path: Path | str) -> dict[str, Any]:
    """Return the manifest of the checkpoint `path`, after comparing every file with its listed size and SHA-256.

    A file that this process has already read, and that has not changed since, is not read again. Version 1 has sizes
    alone. Raises CheckpointError naming the files that differ.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if manifest["version"] == 1:
        log.warning("%s is of checkpoint format 1, without digests: its bytes cannot be checked", path)
        return manifest
    listed = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    try:
        identities = {name: _identity(path / name, sha256) for name, sha256 in listed.items()}
        found = digests(path, [name for name in listed if identities[name] not in _seen])
    except OSError as error:
        raise unreadable(path, f"a file of it cannot be read ({error})") from None
    if wrong := [name for name in found if found[name] != listed[name]]:
        raise unreadable(path, f"{', '.join(wrong)} was changed after it was written: its SHA-256 does not fit")
    _seen.update(identities[name] for name in found)
    return manifest


def _identity(path: Path, sha256: str) -> tuple[int | str, ...]:
    """Return what changes with the file `path`: device, inode, size, time of the last change; and its digest."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns, sha256

"""What a checkpoint's folder says about itself, and whether it is complete.

Version 1 gave each file's size. Version 2 adds the SHA-256 of each file, and that of the manifest itself, so that no
changed bit goes unnoticed. `verify` compares the files with it. Version 3 renames keys of the state (`upgrade`).
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from gpt2_fp8 import __version__
from gpt2_fp8.checkpoint.digest import digests
from gpt2_fp8.checkpoint.errors import CheckpointError, unreadable
from gpt2_fp8.checkpoint.names import MOST_STEPS, step_aside, step_of
from gpt2_fp8.config import bounded

FORMAT = "gpt2_fp8 checkpoint"
VERSION = 3
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.safetensors"
SKELETON, MANIFEST = "state.json", "manifest.json"
SEAL = "sha256"  # the key of the manifest's own digest
_PLACES = {"state_dict.": MODEL, "optimizer_states.": OPTIMIZER, "": STATE}  # by the beginning of a tensor's path


def place(name: str) -> tuple[str, str]:
    """Return (file, key in that file) of a tensor named by its path in the checkpoint."""
    prefix = next(prefix for prefix in _PLACES if name.startswith(prefix))
    return _PLACES[prefix], name.removeprefix(prefix)


def describe(folder: Path, names: Iterable[str], step: int, precision: str | None) -> dict[str, Any]:
    """Return the manifest of a checkpoint of `step` whose files `names` are in `folder`.

    `precision`: what it was trained in. Each file has an object, so that later versions can say more about it.
    """
    written_by = {"gpt2_fp8": __version__, "python": platform.python_version()}
    for package in ("torch", "lightning", "transformer_engine"):
        try:
            written_by[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # Transformer Engine may be absent
            continue
    sha256 = digests(folder, names)
    manifest: dict[str, Any] = {"format": FORMAT, "version": VERSION, "global_step": step}
    if precision is not None:
        manifest["precision"] = precision
    files = {name: {"size": (folder / name).stat().st_size, "sha256": sha256[name]} for name in sha256}
    return sealed({**manifest, "written_by": written_by, "files": files})


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return `manifest` with its own digest: that of the rest as JSON with sorted keys and no spaces."""
    rest = {key: value for key, value in manifest.items() if key != SEAL}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, SEAL: hashlib.sha256(text.encode()).hexdigest()}


def seal_of(path: Path) -> str | None:
    """Return the digest of the manifest in the folder `path`; None if there is none or it is wrong.

    `read_manifest` then says why.
    """
    try:
        manifest = bounded.read_json(path / MANIFEST)
    except (OSError, ValueError):
        return None
    seal = manifest.get(SEAL) if isinstance(manifest, dict) else None
    return seal if isinstance(seal, str) and sealed(manifest)[SEAL] == seal else None


def read_manifest(path: Path | str) -> dict[str, Any]:
    """Return the manifest. It is unchanged, of a known format, and of the step in the folder's name.

    Every file that it lists is there at full length. Their content is not checked here, but in `verify.verified`.
    Raises CheckpointError.
    """
    path = Path(path)
    try:
        if not path.is_dir():
            raise unreadable(path, _why_no_folder(path))
        manifest = read_json(path, MANIFEST)
        _check(path, manifest)
        for name, entry in manifest["files"].items():
            _check_size(path, name, entry["size"])
    except (OSError, RecursionError) as error:
        raise unreadable(path, str(error)) from None
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
        return bounded.read_json(path / name)
    except FileNotFoundError:
        raise unreadable(path, f"it has no {name}") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, f"{name} cannot be read ({error})") from None


def _check(path: Path, manifest: Any) -> None:
    """Raise CheckpointError for a manifest that is not ours, was changed, or has a version not known here."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise unreadable(path, f"{MANIFEST} is not one of a gpt2_fp8 checkpoint")
    version, files = manifest.get("version"), manifest.get("files")
    if type(version) is not int or version < 1:
        raise unreadable(path, f"{MANIFEST} has no version")
    if version > VERSION:
        written_by = manifest.get("written_by")
        writer = written_by.get("gpt2_fp8") if isinstance(written_by, dict) else None
        raise CheckpointError.of(
            f"{path} is of checkpoint format {version}; this gpt2_fp8 {__version__} reads up to {VERSION}",
            f"use gpt2_fp8 {writer} or later" if isinstance(writer, str) else "use the gpt2_fp8 that wrote it",
        )
    if version > 1 and sealed(manifest)[SEAL] != manifest.get(SEAL):
        raise unreadable(path, f"{MANIFEST} was changed after it was written: its own SHA-256 does not fit")
    step = manifest.get("global_step")
    if type(step) is not int or not 0 <= step < MOST_STEPS or not isinstance(files, dict):
        raise unreadable(path, f"{MANIFEST} lacks what it should hold (global_step, files)")
    named = step_aside(path.name) if step_of(path.name) is None else step_of(path.name)
    if named not in (step, None):
        raise unreadable(path, f"it is of step {step}, by its {MANIFEST}, and its name is that of step {named}")
    for name in sorted({MODEL, SKELETON} - files.keys()):
        raise unreadable(path, f"{MANIFEST} does not list {name}")
    for name, entry in files.items():
        if name not in (MODEL, OPTIMIZER, STATE, SKELETON):
            raise unreadable(path, f"{MANIFEST} lists {name!r}, which is not part of a checkpoint")
        whole = isinstance(entry, dict) and type(entry.get("size")) is int
        if not whole or (version > 1 and not isinstance(entry.get("sha256"), str)):
            raise unreadable(path, f"{MANIFEST} does not give the size and the SHA-256 of {name}")


def _check_size(path: Path, name: str, size: int) -> None:
    try:
        found = bounded.regular_file(path / name).st_size
    except FileNotFoundError:
        raise unreadable(path, f"{name} is missing") from None
    except OSError as error:
        raise unreadable(path, f"{name}: {error}") from None
    if found != size:
        raise unreadable(path, f"{name} has {found} bytes of {size}")
    if name == SKELETON:
        try:
            bounded.refuse_large(size)
        except ValueError as error:
            raise unreadable(path, f"{name} cannot be read ({error})") from None


def _why_no_folder(path: Path) -> str:
    if path.exists():
        return "it is a file, and checkpoints are folders; pickles (.ckpt, .pt) are never opened"
    return "it is a link that leads nowhere" if path.is_symlink() else "there is no such folder"

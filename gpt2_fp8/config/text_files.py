"""The files that `data.train_files` and `data.val_files` name, and what kind each is by its name."""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path

from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show

log = logging.getLogger(__name__)

OF_TEXT = ("txt", "jsonl", "json", "csv", "tsv", "parquet", "arrow")
OF_IDS = ("bin",)
_NAME = re.compile(
    r"\.(?:(parquet|arrow|bin)|(txt|md|jsonl|ndjson|json|csv|tsv)(?:\.(gz|zstd?|bz2|lz4))?)$", re.IGNORECASE
)
_SAME = {"md": "txt", "ndjson": "jsonl", "zstd": "zst"}
_ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # as `datasets` saves them
_SHOWN = {
    OF_TEXT: "give files that end in .txt, .md, .jsonl, .ndjson, .json, .csv, .tsv, all with or without .gz, .zst, "
    ".bz2, .lz4, or in .parquet, .arrow",
    OF_IDS: "give files of token ids, which end in .bin",
}


def kind_of(name: str | Path) -> tuple[str, str] | None:
    """Return the kind, of `OF_TEXT` or `OF_IDS`, and the compression ("": none) that a name tells; None: another."""
    found = _NAME.search(str(name))
    if found is None:
        return None
    kind, compression = (found[1] or found[2]).lower(), (found[3] or "").lower()
    return _SAME.get(kind, kind), _SAME.get(compression, compression)


def find(pattern: str, kinds: tuple[str, ...]) -> list[Path]:
    """Return the files that a name or a glob stands for, sorted. A folder's are those of `kinds`, in its folders too.

    Where a glob matches files, folders that it matches too are left out. What is no file stays, as `disk.find` has it.
    """
    matches = disk.find(pattern) if pattern else []
    if any(not path.is_dir() for path in matches):
        return [path for path in matches if not path.is_dir()]
    return [path for folder in matches for path in _find_in(folder, kinds)]


def _find_in(folder: Path, kinds: tuple[str, ...]) -> list[Path]:
    """Return a folder's files of `kinds`, but hidden ones and what `datasets` notes beside the text."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in _ABOUT)
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    found = [path for path in files if (kind_of(path) or ("",))[0] in kinds]
    if found and (others := len(files) - len(found)):
        other = next(path for path in files if path not in set(found))
        _say(f"data: {others} files in {folder} are of another kind and are left out, such as {other.name}")
    return found


@cache
def _say(once: str) -> None:
    log.info(once)


def find_all(key: str, patterns: list[str], kinds: tuple[str, ...], problems: list[Problem]) -> list[Path]:
    """Return the files that all `patterns` of a key stand for. What is wrong by a name is added to `problems`."""
    found = []
    for pattern in patterns:
        reason, remedy = _why_not_saved(pattern)
        files = find(pattern, kinds) if not reason else []
        if not reason and not files:
            reason, remedy = _why_none(pattern, kinds)
        if not reason:
            reason = next(filter(None, map(disk.why_unreadable, files)), "")
        if not reason and (odd := [path for path in files if (kind_of(path) or ("",))[0] not in kinds]):
            reason, remedy = f"{odd[0]} is of an unknown kind", _SHOWN[kinds]
        if reason:
            problems.append(Problem(f"{key}: {reason}", remedy, (key,)))
        found += files if not reason else []
    return found


def _why_none(pattern: str, kinds: tuple[str, ...]) -> tuple[str, str]:
    if folders := (disk.find(pattern) if pattern else []):
        return f"there is no file to read in the folder {folders[0]}", _SHOWN[kinds]
    return f"{show(pattern)} is no file, and matches none (looked in {Path.cwd()})", ""


def _why_not_saved(pattern: str) -> tuple[str, str]:
    """Return why a folder is not one text, and what to name: `datasets` has saved a DatasetDict there; else ""."""
    about = Path(pattern).expanduser() / "dataset_dict.json"
    if not pattern or not about.is_file():
        return "", ""
    try:
        splits = [str(split) for split in disk.read_json(about)["splits"]]
    except (OSError, ValueError, KeyError, TypeError):
        splits = []
    train = "train" if "train" in splits or not splits else splits[0]
    held_out = next((split for split in splits if split.startswith(("val", "dev", "test")) and split != train), None)
    remedy = f"data.train_files={pattern.rstrip('/')}/{train}"
    remedy += f" data.val_files={pattern.rstrip('/')}/{held_out}" if held_out else ""
    return f"{pattern} is a DatasetDict of the splits {', '.join(splits) or '?'}", remedy

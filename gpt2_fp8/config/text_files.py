"""The files that `data.train_files` and `data.val_files` name, and what kind each is by its name."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
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
# As `datasets` saves them, and a tokenizer beside its text.
_ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json",
          "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
_SHOWN = {
    OF_TEXT: "give files that end in .txt, .md, .jsonl, .ndjson, .json, .csv, .tsv, all with or without .gz, .zst, "
    ".bz2, .lz4, or in .parquet, .arrow; .bin is for data=token_files",
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

    Where a glob matches files, all else that it matches is left out. Where nothing is a file or a folder, it stays.
    """
    matches = disk.find(pattern) if pattern else []
    files, folders = ([path for path in matches if is_kind(path)] for is_kind in (Path.is_file, Path.is_dir))
    if files or not folders:
        return files or matches
    return [path for folder in folders for path in _find_in(folder, kinds)]


def _find_in(folder: Path, kinds: tuple[str, ...]) -> list[Path]:
    """Return a folder's files of `kinds`, but hidden ones and what is known to be about the text."""
    if folder.resolve() == Path(folder.resolve().anchor):  # a slip; a whole disk would be searched
        return []
    inside = (Path(place, name) for place, _, names in os.walk(folder) for name in names if name not in _ABOUT)
    files = sorted(path for path in inside if os.path.isfile(path))
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    found = [path for path in files if _is_of(path, kinds)]
    if found and (others := len(files) - len(found)):
        log.info("data: %d files in %s are of another kind and are left out", others, folder)
    return found


def _is_of(path: Path, kinds: tuple[str, ...]) -> bool:
    return (kind_of(path) or ("",))[0] in kinds


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
        if not reason and (odd := [path for path in files if not _is_of(path, kinds)]):
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
    splits: list[str] = []
    with suppress(OSError, ValueError, KeyError, TypeError):
        splits += disk.read_json(about)["splits"]
    val = [f" data.val_files={about.parent}/{split}" for split in splits if split.startswith(("val", "dev", "test"))]
    reason = f"{pattern} is a DatasetDict of the splits {', '.join(map(str, splits))}"
    return reason, f"data.train_files={about.parent}/train{''.join(val[:1])}"

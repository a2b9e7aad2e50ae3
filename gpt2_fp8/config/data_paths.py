"""The paths of a run's text: files and globs, the folder of its token cache, its tokenizer's file."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from gpt2_fp8.config import globs, mixture, output_folder, tokenizer_file
from gpt2_fp8.config.data_schema import FileOrHubData, FilesData, Mixed, TextData, TokenFilesData
from gpt2_fp8.config.errors import Finding, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig

_EXAMPLE_OF_IDS = "data.train_files='[/corpus/*_train_*.bin]' (token ids of nanoGPT, llm.c or modded-nanogpt)"
_EXAMPLE = "data.train_files='[/corpus/*.jsonl.zst]' (txt, jsonl, jsonl.zst and parquet)"


def placed(data: Mixed, absolute: Callable[[str], str]) -> Mixed:
    """Return a source with each of its paths replaced by what `absolute` makes of it."""
    if isinstance(data, (FilesData, TokenFilesData)):
        data = replace(
            data, train_files=list(map(absolute, data.train_files)), val_files=list(map(absolute, data.val_files))
        )
    if isinstance(data, FileOrHubData):
        data = replace(data, path=absolute(data.path))
    if isinstance(data, TextData) and data.cache_dir is not None:
        data = replace(data, cache_dir=absolute(data.cache_dir))
    if data.tokenizer not in tokenizer_file.NAMES:
        data = replace(data, tokenizer=absolute(data.tokenizer))
    return data


def check(config: RunConfig) -> Iterator[Finding]:
    """Find everything that is wrong with the paths of each source of a run's text."""
    for name, source in mixture.sources_of(config.data):
        yield from (mixture.found_in(found, name) for found in _data(source))


def _data(data: Mixed) -> Iterator[Finding]:
    if isinstance(data, FileOrHubData) and data.path:
        path = Path(data.path).expanduser()
        if os.path.lexists(path) and (reason := globs.why_not(path)):
            yield Finding.of("data.path", f"data.path: {reason}")
    if isinstance(data, (FilesData, TokenFilesData)):
        if not data.train_files:
            example = _EXAMPLE if isinstance(data, FilesData) else _EXAMPLE_OF_IDS
            yield Finding.of("data.train_files", "data.train_files is empty: nothing to train on", example)
        yield from _patterns("data.train_files", data.train_files)
        yield from _patterns("data.val_files", data.val_files)
        none_held_out = isinstance(data, TokenFilesData) or data.val_fraction == 0
        if not data.val_files and data.val_sequences > 0 and none_held_out:
            cause = "data.val_files=[]: nothing is held out to validate on"
            yield Finding.of("data.val_files", cause, "data.val_sequences=0 for no validation")
    if isinstance(data, TextData) and data.cache_dir is not None:
        yield from output_folder.check(data.cache_dir, "data.cache_dir")
    try:
        tokenizer_file.number_of_ids(data.tokenizer)
    except UserError as error:
        yield from (Finding(("data.tokenizer",), problem) for problem in error.problems)


def _patterns(key: str, patterns: list[str]) -> Iterator[Finding]:
    for pattern in patterns:
        matches = globs.find(pattern) if pattern else []
        reasons = [reason for path in matches if (reason := globs.why_not(path))]
        if not matches:
            what = "matches no file" if glob.has_magic(pattern) else "does not exist"
            yield Finding.of(key, f"{key}: {show(pattern)} {what} (looked in {Path.cwd()})")
        elif len(reasons) == len(matches) or any("cannot be read" in reason for reason in reasons):
            yield Finding.of(key, f"{key}: {reasons[0]}")

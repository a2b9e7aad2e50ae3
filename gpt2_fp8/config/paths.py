"""The texts and paths of a run's keys: whether they can be a name or a path, and whether something is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Literal

from gpt2_fp8.config import disk, hf_config, mixture, tokenizer_file
from gpt2_fp8.config.data_schema import FileOrHubData, FilesData, Mixed, TextData, TokenFilesData
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import problem, show
from gpt2_fp8.config.schema import RunConfig

Which = Literal["last", "best"]
EXAMPLES = "ckpt_path=outputs/RUN, or a checkpoint's folder: ckpt_path=outputs/RUN/checkpoints/step-NNNNNNNN"


def check(config: RunConfig) -> list[Problem]:
    """Find everything that is wrong with the paths of a configuration."""
    found = [*_check_run_name(config.run_name), *_check_checkpoints(config)]
    for name, source in mixture.sources_of(config.data):
        found += (mixture.as_named(problem, name) for problem in _check_source(source))
    return found


def _check_run_name(name: str) -> Iterator[Problem]:
    reason = None
    if not name.strip() or name != name.strip() or not name.isprintable():
        reason = "is no plain name"
    elif name.startswith(("/", "~")) or "\\" in name or {"..", "."} & {*PurePosixPath(name).parts, name}:
        reason = "leads out of outputs/"
    if reason:
        cause = f"run_name={show(name)}: {reason}"
        yield Problem(cause, "hydra.run.dir=FOLDER puts a run elsewhere", ("run_name",))


def _check_checkpoints(config: RunConfig) -> Iterator[Problem]:
    if config.ckpt_path is not None and config.init_from is not None:
        yield problem(config, "ckpt_path init_from", "one continues a run, the other starts one from weights")
    for key, value in (("ckpt_path", config.ckpt_path), ("init_from", config.init_from)):
        if value is None or (key == "ckpt_path" and value in ("last", "best")):
            continue
        path, example = Path(value).expanduser(), f"{key}=outputs/RUN/checkpoints/step-NNNNNNNN"
        if not value or not path.is_dir():
            yield problem(config, key, f"there is no such folder (looked in {Path.cwd()})", example)
        elif is_run(path) and not is_checkpoint(path):
            yield problem(config, key, "is a run's folder, and a checkpoint's is needed", example)
        elif key == "ckpt_path" and hf_config.is_folder(path):
            yield problem(config, key, "is a Hugging Face folder", f"init_from={show(value)}")


def _check_source(data: Mixed) -> Iterator[Problem]:
    if isinstance(data, FileOrHubData) and data.path:
        path = Path(data.path).expanduser()
        if os.path.lexists(path) and (reason := disk.why_unreadable(path)):
            yield Problem(f"data.path: {reason}", keys=("data.path",))
    if isinstance(data, (FilesData, TokenFilesData)):
        if not data.train_files:
            kinds = "txt, jsonl, jsonl.zst and parquet" if isinstance(data, FilesData) else ".bin files of token ids"
            yield problem(data, "train_files", "nothing to train on", f"name files: {kinds}", prefix="data.")
        for key, patterns in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
            yield from (Problem(cause, keys=(key,)) for word in patterns for cause in _check_pattern(key, word))
        none_held_out = isinstance(data, TokenFilesData) or data.val_fraction == 0
        if not data.val_files and data.val_sequences > 0 and none_held_out:
            remedy = "data.val_sequences=0 for no validation"
            yield problem(data, "val_files", "nothing is held out to validate on", remedy, prefix="data.")
    if isinstance(data, TextData) and data.cache_dir is not None:
        yield from disk.check_folder(data.cache_dir, "data.cache_dir")
    try:
        tokenizer_file.number_of_ids(data.tokenizer)
    except UserError as error:
        yield from (one._replace(keys=("data.tokenizer",)) for one in error.problems)


def _check_pattern(key: str, pattern: str) -> Iterator[str]:
    matches = disk.find(pattern) if pattern else []
    reasons = [reason for path in matches if (reason := disk.why_unreadable(path))]
    if not matches:
        yield f"{key}: {show(pattern)} is no file, and matches none (looked in {Path.cwd()})"
    elif len(reasons) == len(matches) or any("cannot be read" in reason for reason in reasons):
        yield f"{key}: {reasons[0]}"


def absolute(config: RunConfig, base: Path) -> RunConfig:
    """Return the configuration with relative paths made absolute, as seen from the folder `base`."""

    def placed(text: str) -> str:
        return str(base / Path(text).expanduser()) if text else text

    sources = [_place_source(source, placed) for _, source in mixture.sources_of(config.data)]
    ckpt_path, init_from = config.ckpt_path, config.init_from
    return replace(
        config,
        data=mixture.with_sources(config.data, sources),
        ckpt_path=ckpt_path if ckpt_path in (None, "last", "best") else placed(ckpt_path),
        init_from=init_from if init_from is None else placed(init_from),
    )


def _place_source(data: Mixed, placed: Callable[[str], str]) -> Mixed:
    """Return a source with each of its paths replaced by what `placed` makes of it."""
    if isinstance(data, (FilesData, TokenFilesData)):
        train_files, val_files = (list(map(placed, names)) for names in (data.train_files, data.val_files))
        data = replace(data, train_files=train_files, val_files=val_files)
    if isinstance(data, FileOrHubData):
        data = replace(data, path=placed(data.path))
    if isinstance(data, TextData) and data.cache_dir is not None:
        data = replace(data, cache_dir=placed(data.cache_dir))
    if data.tokenizer not in tokenizer_file.NAMES:
        data = replace(data, tokenizer=placed(data.tokenizer))
    return data


def is_run(path: Path) -> bool:
    """Return whether a folder is a run's, with checkpoints below it."""
    return os.path.isdir(path / "checkpoints")


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder may be a checkpoint's."""
    return os.path.lexists(path / "manifest.json")


def why_no_model(path: Path) -> str | None:
    """Return why a folder holds no trained model of this program, as part of a sentence; None if it may."""
    if not os.path.isdir(path):
        return f"{'is a file' if os.path.exists(path) else 'does not exist'} (looked in {Path.cwd()})"
    if is_run(path) or is_checkpoint(path):
        return None
    if hf_config.is_folder(path):
        return "it is a Hugging Face folder, and no checkpoint: python -m gpt2_fp8.import_hf makes one of it"
    return "it has neither checkpoints, as a run's folder, nor a manifest.json, as a checkpoint's"


def check_trained(ckpt_path: str | None, which: Which) -> Iterator[Problem]:
    """Find what is wrong with a program's `ckpt_path` and `checkpoint`, as far as the names of files tell."""
    if not ckpt_path:
        yield Problem("ckpt_path is missing: it names the model", EXAMPLES)
        return
    path, said = Path(ckpt_path.replace("\0", "\ufffd")).expanduser(), f"ckpt_path={show(ckpt_path)}"
    if why := why_no_model(path):
        yield Problem(f"{said}: {why}", EXAMPLES)
    elif which == "best" and not is_run(path):
        yield Problem(f"checkpoint=best chooses among a run's checkpoints, and {said} is one")

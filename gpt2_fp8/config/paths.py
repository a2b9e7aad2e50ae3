"""The paths that a run was given: whether they exist, and whether its folder can be written. Nothing made stays."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path, PurePosixPath

from gpt2_fp8.config import globs, hf_check, hints, mixture, run_folder, tokenizer_file, trained_folder
from gpt2_fp8.config.data_schema import FileOrHubData, FilesData, Mixed, TextData, TokenFilesData
from gpt2_fp8.config.errors import Finding, Problem, UserError
from gpt2_fp8.config.parsing import key_paths, show, value_of
from gpt2_fp8.config.schema import RunConfig

_MAY_HOLD_ANYTHING = (
    "run_name",
    "callbacks.sample_prompt",
    "notes",
)  # of the texts; the first has a message of its own
_LONGEST = 4096  # characters of a text: of a path, Linux's own limit; all of them reach the log
_EXAMPLE_OF_IDS = "data.train_files='[/corpus/*_train_*.bin]' (token ids of nanoGPT, llm.c or modded-nanogpt)"
_EXAMPLE = "data.train_files='[/corpus/*.jsonl.zst]' (txt, jsonl, jsonl.zst and parquet)"


def check(config: RunConfig) -> list[Finding]:
    """Find everything that is wrong with the paths of a configuration."""
    found = list(_texts(config))
    return [*found, *_run_name(config.run_name), *(() if found else (*_checkpoints(config), *_sources(config)))]


def absolute(config: RunConfig, base: Path) -> RunConfig:
    """Return the configuration with relative paths made absolute, as seen from the folder `base`."""

    def placed(text: str) -> str:
        return str(base / Path(text).expanduser()) if text else text

    sources = [_placed(source, placed) for _, source in mixture.sources_of(config.data)]
    data = mixture.with_sources(config.data, sources)
    ckpt_path, init_from = config.ckpt_path, config.init_from
    return replace(
        config,
        data=data,
        ckpt_path=ckpt_path if ckpt_path in (None, "last", "best") else placed(ckpt_path),
        init_from=init_from if init_from is None else placed(init_from),
    )


def _placed(data: Mixed, placed: Callable[[str], str]) -> Mixed:
    if isinstance(data, (FilesData, TokenFilesData)):
        data = replace(
            data, train_files=list(map(placed, data.train_files)), val_files=list(map(placed, data.val_files))
        )
    if isinstance(data, FileOrHubData):
        data = replace(data, path=placed(data.path))
    if isinstance(data, TextData) and data.cache_dir is not None:
        data = replace(data, cache_dir=placed(data.cache_dir))
    if data.tokenizer not in tokenizer_file.NAMES:
        data = replace(data, tokenizer=placed(data.tokenizer))
    return data


def check_folder(path: str | Path, setting: str, key: str | None = None) -> list[Finding]:
    """Check that a folder can be written, or made with its parents.

    `setting` is the key that holds it. `key` is the key that the user gave.
    """
    key = key or setting
    if reason := _no_path(str(path)):
        return [_finding(key, f"{setting}={show(str(path))}: {reason}", f"choose a folder: {setting}=FOLDER")]
    path = Path(path).expanduser()
    existing = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    remedy = f"choose a folder that can be written: {setting}=FOLDER"
    if not os.path.isdir(existing):
        return [_finding(key, f"{setting}={show(str(path))}: {existing} {run_folder.no_folder(existing)}", remedy)]
    if reason := run_folder.unwritable(existing):
        return [_finding(key, f"{setting}={show(str(path))}: {existing} cannot be written: {reason}", remedy)]
    return []


def _no_path(path: str) -> str | None:
    """Return why a text cannot be the path of a folder, whatever exists; None if it can."""
    if not path.strip():
        return "is empty"
    if not path.isprintable():
        return "has control characters"
    too_long = any(len(os.fsencode(part)) > 255 for part in Path(path).parts) or len(os.fsencode(path)) > 4000
    return "is too long for a path" if too_long else None


def check_untaken(folder: Path) -> list[Finding]:
    """Check that a fresh run may have a folder: its checkpoints would replace those of another run."""
    saved = sorted(path.parent.name for path in folder.glob("checkpoints/*/manifest.json"))
    if not saved:
        return []
    remedy = "ckpt_path=last continues it; another run_name starts a new one"
    return [_finding("run_name", f"{folder} already holds a run, saved up to {saved[-1]}", remedy)]


def _texts(config: RunConfig) -> Iterator[Finding]:
    """Check texts for what does harm in paths, requests and messages: a NUL, or a terminal's escape sequence."""
    data = config.data
    keys = [*key_paths(RunConfig)]
    keys += [
        f"data.sources.{name}.{field.name}" for name, one in mixture.sources_of(data) if name for field in fields(one)
    ]
    for key in keys:
        value = value_of(config, key)
        texts = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else [value]
        bad = next((text for text in texts if isinstance(text, str) and not text.isprintable()), None)
        long = next((text for text in texts if isinstance(text, str) and len(text) > _LONGEST), None)
        if long is not None and key != "run_name":
            cause = f"{key}: {show(long)} has {len(long):,} characters"
            yield _finding(key, cause, f"a text has at most {_LONGEST:,}")
        if bad is not None and key not in _MAY_HOLD_ANYTHING:
            yield _finding(key, f"{key}: {show(bad)} has control characters", "leave them out")


def _run_name(name: str) -> Iterator[Finding]:
    remedy = "choose a plain name, such as run_name=my_first_run"
    reason = None
    if not name.strip() or name != name.strip():
        reason = "is empty or has blanks around it"
    elif not name.isprintable():
        reason = "has control characters"
    elif name.startswith(("/", "~")) or "\\" in name or {"..", "."} & set(PurePosixPath(name).parts) or name == ".":
        reason = "leads out of outputs/"
        remedy = "choose a plain name; hydra.run.dir=FOLDER puts a run elsewhere"
    elif any(len(part.encode()) > 200 for part in PurePosixPath(name).parts) or len(name.encode()) > 1000:
        reason = "is too long for a folder's name"
    if reason:
        yield _finding("run_name", f"run_name={show(name)}: {reason}", remedy)


def _checkpoints(config: RunConfig) -> Iterator[Finding]:
    if config.ckpt_path is not None and config.init_from is not None:
        problem = Problem(
            f"ckpt_path={show(config.ckpt_path)}, init_from={show(config.init_from)}: one continues a run, the other "
            "starts one from weights",
            "give one of them; after a first start from weights, ckpt_path=last alone continues",
        )
        yield Finding(("ckpt_path", "init_from"), problem)
    named = {"ckpt_path": config.ckpt_path, "init_from": config.init_from}
    for key, value in named.items():
        if value is None or (key == "ckpt_path" and value in ("last", "best")):
            continue
        path = Path(value).expanduser()
        remedy = f"give a checkpoint's folder: {key}=outputs/RUN/checkpoints/step-NNNNNNNN"
        if key == "ckpt_path":
            remedy += ", or ckpt_path=last with the run_name to continue"
        if value == "":
            yield _finding(key, f"{key} is empty", f"{key}=null for none; else {remedy}")
        elif not os.path.exists(path):
            meant = hints.near(value, ("last", "best"), 1) if key == "ckpt_path" else []
            remedy = f"ckpt_path={meant[0]}, with the run_name to continue" if meant else remedy
            yield _finding(key, f"{key}={show(value)}: does not exist (looked in {Path.cwd()})", remedy)
        elif not os.path.isdir(path):
            yield _finding(key, f"{key}={show(value)}: is a file, and checkpoints here are folders", remedy)
        elif trained_folder.is_run(path) and not trained_folder.is_checkpoint(path):
            newest = trained_folder.newest(path)
            remedy = f"leave {key} out: it has saved none yet" if newest is None else f"{key}={_beside(value, newest)}"
            yield _finding(key, f"{key}={show(value)}: is a run's folder, and a checkpoint's is needed", remedy)
        elif key == "ckpt_path" and hf_check.is_folder(path):
            cause = f"{key}={show(value)}: is a Hugging Face folder, which holds no run to continue"
            yield _finding(key, cause, f"init_from={show(value)} begins a run with its weights")


def _beside(typed: str, newest: Path) -> str:
    """Return a checkpoint of the run's folder that was typed, as it would be typed."""
    return show(str(Path(typed, "checkpoints", newest.name)))


def _sources(config: RunConfig) -> Iterator[Finding]:
    for name, source in mixture.sources_of(config.data):
        yield from (mixture.found_in(found, name) for found in _data(source))


def _data(data: Mixed) -> Iterator[Finding]:
    if isinstance(data, FileOrHubData) and data.path:
        path = Path(data.path).expanduser()
        if path.is_dir():
            remedy = f"data=text_files data.train_files='[{data.path}/*.txt]'"
            yield _finding("data.path", f"data.path={show(data.path)}: is a folder, and one file is needed", remedy)
        elif os.path.lexists(path) and (reason := globs.why_not(path) or globs.unreadable(path)):
            yield _finding("data.path", f"data.path: {reason}", "name a file of text, or one that is not there")
    if isinstance(data, (FilesData, TokenFilesData)):
        if not data.train_files:
            example = _EXAMPLE if isinstance(data, FilesData) else _EXAMPLE_OF_IDS
            yield _finding("data.train_files", "data.train_files is empty: nothing to train on", example)
        yield from _patterns("data.train_files", data.train_files)
        yield from _patterns("data.val_files", data.val_files)
    if isinstance(data, TokenFilesData) and not data.val_files and data.val_sequences > 0:
        yield _finding(
            "data.val_files",
            "data.val_files=[]: nothing to validate on",
            "data.val_files='[FOLDER/val.bin]', or data.val_sequences=0 for no validation",
        )
    if isinstance(data, FilesData) and not data.val_files and data.val_fraction == 0 and data.val_sequences > 0:
        problem = Problem(
            "data.val_fraction=0, data.val_files=[]: nothing is held out to validate on",
            "data.val_fraction=0.01, or data.val_sequences=0 for no validation",
        )
        yield Finding(("data.val_fraction", "data.val_files"), problem)
    if isinstance(data, TextData) and data.cache_dir is not None:
        yield from check_folder(data.cache_dir, "data.cache_dir")
    try:
        tokenizer_file.number_of_ids(data.tokenizer)
    except UserError as error:
        yield from (Finding(("data.tokenizer",), problem) for problem in error.problems)


def _patterns(key: str, patterns: list[str]) -> Iterator[Finding]:
    for pattern in patterns:
        matches = globs.find(pattern) if pattern else []
        reasons = {path: reason for path in matches if (reason := globs.why_not(path))}
        named = [path for path in reasons if not str(path).isprintable()]
        if not matches:
            what = "matches no file" if glob.has_magic(pattern) else "does not exist"
            yield _finding(key, f"{key}: {show(pattern)} {what} (looked in {Path.cwd()})", "correct the path")
        elif named:
            yield _finding(key, f"{key}: {reasons[named[0]]}", "rename the file, or leave it out")
        elif len(reasons) == len(matches):
            first = next(iter(reasons))
            remedy = f"name its files: {key}='[{first}/*.txt]'" if first.is_dir() else "name files that hold the text"
            yield _finding(key, f"{key}: {reasons[first]}", remedy)
        else:
            kept_out = [reason for path in matches if path not in reasons and (reason := globs.unreadable(path))]
            if kept_out:
                more = f", and {len(kept_out) - 1} more" if len(kept_out) > 1 else ""
                yield _finding(key, f"{key}: {kept_out[0]}{more}", "make it readable (chmod u+r), or leave it out")


def _finding(key: str, cause: str, remedy: str) -> Finding:
    return Finding((key,), Problem(cause, remedy))

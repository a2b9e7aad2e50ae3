"""The texts and paths of a run's keys: whether they can be a name or a path, and whether a checkpoint is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path, PurePosixPath

from gpt2_fp8.config import data_paths, hf_check, hints, mixture, trained_folder
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import key_paths, show, value_of
from gpt2_fp8.config.schema import RunConfig

_MAY_HOLD_ANYTHING = (
    "run_name",
    "callbacks.sample_prompt",
    "notes",
)  # of the texts; the first has a message of its own
_LONGEST = 4096  # characters of a text: of a path, Linux's own limit; all of them reach the log


def check(config: RunConfig) -> list[Finding]:
    """Find everything that is wrong with the paths of a configuration."""
    found = list(_texts(config))
    return [*found, *_run_name(config.run_name), *(() if found else (*_checkpoints(config), *data_paths.check(config)))]


def absolute(config: RunConfig, base: Path) -> RunConfig:
    """Return the configuration with relative paths made absolute, as seen from the folder `base`."""

    def placed(text: str) -> str:
        return str(base / Path(text).expanduser()) if text else text

    sources = [data_paths.placed(source, placed) for _, source in mixture.sources_of(config.data)]
    data = mixture.with_sources(config.data, sources)
    ckpt_path, init_from = config.ckpt_path, config.init_from
    return replace(
        config,
        data=data,
        ckpt_path=ckpt_path if ckpt_path in (None, "last", "best") else placed(ckpt_path),
        init_from=init_from if init_from is None else placed(init_from),
    )


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
            yield Finding.of(key, cause, f"a text has at most {_LONGEST:,}")
        if bad is not None and key not in _MAY_HOLD_ANYTHING:
            yield Finding.of(key, f"{key}: {show(bad)} has control characters", "leave them out")


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
        yield Finding.of("run_name", f"run_name={show(name)}: {reason}", remedy)


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
        else:
            remedy += ", or the folder of Hugging Face's weights on this machine: nothing is downloaded"
        if value == "":
            yield Finding.of(key, f"{key} is empty", f"{key}=null for none; else {remedy}")
        elif not os.path.exists(path):
            meant = hints.near(value, ("last", "best"), 1) if key == "ckpt_path" else []
            remedy = f"ckpt_path={meant[0]}, with the run_name to continue" if meant else remedy
            yield Finding.of(key, f"{key}={show(value)}: does not exist (looked in {Path.cwd()})", remedy)
        elif not os.path.isdir(path):
            yield Finding.of(key, f"{key}={show(value)}: is a file, and checkpoints here are folders", remedy)
        elif trained_folder.is_run(path) and not trained_folder.is_checkpoint(path):
            newest = trained_folder.newest(path)
            remedy = f"leave {key} out: it has saved none yet" if newest is None else f"{key}={_beside(value, newest)}"
            yield Finding.of(key, f"{key}={show(value)}: is a run's folder, and a checkpoint's is needed", remedy)
        elif key == "ckpt_path" and hf_check.is_folder(path):
            cause = f"{key}={show(value)}: is a Hugging Face folder, which holds no run to continue"
            yield Finding.of(key, cause, f"init_from={show(value)} begins a run with its weights")


def _beside(typed: str, newest: Path) -> str:
    """Return a checkpoint of the run's folder that was typed, as it would be typed."""
    return show(str(Path(typed, "checkpoints", newest.name)))

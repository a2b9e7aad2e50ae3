"""The texts and paths of a run's keys: whether they can be a name or a path, and whether a checkpoint is there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from gpt2_fp8.config import data_paths, hf_check, mixture, trained_folder
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import key_paths, show, value_of
from gpt2_fp8.config.schema import RunConfig

_MAY_HOLD_ANYTHING = ("run_name", "callbacks.sample_prompt", "notes")  # the first has a message of its own


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
    for key in key_paths(RunConfig):
        value = value_of(config, key)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.isprintable() and key not in _MAY_HOLD_ANYTHING:
                yield Finding.of(key, f"{key}: {show(text)} has control characters")


def _run_name(name: str) -> Iterator[Finding]:
    reason = None
    if not name.strip() or name != name.strip() or not name.isprintable():
        reason = "is no plain name"
    elif name.startswith(("/", "~")) or "\\" in name or {"..", "."} & {*PurePosixPath(name).parts, name}:
        reason = "leads out of outputs/"
    if reason:
        yield Finding.of("run_name", f"run_name={show(name)}: {reason}", "hydra.run.dir=FOLDER puts a run elsewhere")


def _checkpoints(config: RunConfig) -> Iterator[Finding]:
    if config.ckpt_path is not None and config.init_from is not None:
        problem = Problem(
            f"ckpt_path={show(config.ckpt_path)}, init_from={show(config.init_from)}: one continues a run, the other "
            "starts one from weights",
            "give one of them; after a first start from weights, ckpt_path=last alone continues",
        )
        yield Finding(("ckpt_path", "init_from"), problem)
    for key, value in (("ckpt_path", config.ckpt_path), ("init_from", config.init_from)):
        if value is None or (key == "ckpt_path" and value in ("last", "best")):
            continue
        path = Path(value).expanduser()
        example = f"{key}=outputs/RUN/checkpoints/step-NNNNNNNN"
        if not value or not path.is_dir():
            yield Finding.of(key, f"{key}={show(value)}: there is no such folder (looked in {Path.cwd()})", example)
        elif trained_folder.is_run(path) and not trained_folder.is_checkpoint(path):
            yield Finding.of(key, f"{key}={show(value)}: is a run's folder, and a checkpoint's is needed", example)
        elif key == "ckpt_path" and hf_check.is_folder(path):
            yield Finding.of(key, f"{key}={show(value)}: is a Hugging Face folder", f"init_from={show(value)}")

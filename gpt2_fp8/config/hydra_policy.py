"""Which of Hydra's own settings a user may change, and to what. The others could make Hydra import code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import PurePosixPath

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.parsing import show

# `hydra.launcher` and `hydra.sweeper` take the parameters of the plugin that is chosen; never what it is made of.
KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.verbose", "hydra.mode")
PREFIXES = ("hydra.job.", "hydra.launcher.", "hydra.sweeper.")
GROUPS = ("hydra/launcher", "hydra/sweeper", "hydra/job_logging", "hydra/hydra_logging")
_MAY = f"{', '.join(KEYS)}, hydra.searchpath, {', '.join(p + '*' for p in PREFIXES)} and {', '.join(GROUPS)} may be set"


def refuse_override(key: str, value: object) -> Problem | None:
    """Why `hydra.KEY=value` or `hydra/GROUP=value` is refused, or None."""
    if names_code(key, value):
        return Problem(f"{key}: what Hydra builds is not set from the command line", "leave _target_ out")
    if key == "hydra.job.chdir" and value:
        return Problem(
            "hydra.job.chdir=true: paths would be looked up in the run's own folder",
            "leave it out; every path is relative to where the command was typed",
        )
    if key == "hydra.searchpath":
        return _searchpath(value)
    if key == "hydra.job.env_copy":
        return _env_copy(value)
    if key in KEYS or key in GROUPS or key.startswith(PREFIXES):
        return None
    return Problem(f"{key} is not a setting of Hydra's that this program leaves open", _MAY)


def names_code(key: str, value: object) -> bool:
    """Whether a key, or a value's keys at any depth, name something for Hydra to import."""
    if {"_target_", "_call_", "()"} & set(key.split(".")):
        return True
    if isinstance(value, dict):
        return any(names_code(str(k), v) for k, v in value.items())
    return isinstance(value, (list, tuple)) and any(names_code("", item) for item in value)


def _searchpath(value: object) -> Problem | None:
    """Hydra takes a list of texts, and looks at the first that it is given."""
    if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
        return None
    folder = value if isinstance(value, str) and value else "FOLDER"
    return Problem(f"hydra.searchpath={show(value)}: needs a list of folders", f"'hydra.searchpath=[{folder}]'")


def _env_copy(value: object) -> Problem | None:
    names = value if isinstance(value, list) else [value]
    missing = [name for name in names if not isinstance(name, str) or name not in os.environ]
    if isinstance(value, list) and not missing:
        return None
    what = f"{show(missing[0])} is not in the environment" if isinstance(value, list) else "needs a list of names"
    return Problem(f"hydra.job.env_copy={show(value)}: {what}", "hydra.job.env_copy=[NAME], of what is set there")


def check_values(get: Callable[[str], object]) -> list[Finding]:
    """What is wrong with the values of Hydra's settings that it would take, and fall over. `get` gives a key's."""
    found = []
    for key, (reason, remedy) in _RULES.items():
        value = get(key)
        if why := reason(value):
            found.append(Finding((key,), Problem(f"{key}={show(value)}: {why}", remedy)))
    return found


def _job_name(value: object) -> str | None:
    """The log's name is made of it."""
    name = str(value)
    if not isinstance(value, str) or not name.strip() or name in (".", ".."):
        return "is no name of a file"
    if "/" in name or not name.isprintable():
        return "the log's file has this name, and a name has no / and no control characters"
    return "is too long for a file's name" if len(os.fsencode(name)) > 200 else None


def _output_subdir(value: object) -> str | None:
    """Hydra writes its files there."""
    if value is None:
        return None
    path = PurePosixPath(str(value))
    if not str(value).isprintable() or any(len(os.fsencode(part)) > 200 for part in path.parts):
        return "is no name of a folder"
    if path.is_absolute() or ".." in path.parts:
        return "leads out of the run's folder"
    return f"{path.parts[0]} is the run's own" if path.parts and path.parts[0] in RUN_FILES else None


def _verbose(value: object) -> str | None:
    names = value if isinstance(value, list) else [value]
    good = isinstance(value, bool) or all(isinstance(name, str) for name in names)
    return None if good else "must be true, false, or names of loggers"


def _max_batch_size(value: object) -> str | None:
    good = value is None or (type(value) is int and value >= 1)
    return None if good else "must be 1 or more, or null"


def _env_set(value: object) -> str | None:
    names = [str(name) for name in value] if isinstance(value, dict) else []
    bad = [name for name in names if not name or "=" in name or not name.isprintable()]
    return f"{show(bad[0])} is no name of a variable" if bad else None


# What a run writes into its folder, which Hydra's own files are to leave alone.
RUN_FILES = ("checkpoints", "tensorboard", "run.log", "metrics.csv", "metrics.csv.tmp", "summary.json",
             ".summary.json.tmp", ".lock")  # fmt: skip
_RULES: dict[str, tuple[Callable[[object], str | None], str]] = {
    "hydra.job.name": (_job_name, "choose a plain name, such as hydra.job.name=run"),
    "hydra.output_subdir": (_output_subdir, "a folder in the run's, as hydra.output_subdir=.hydra, or null for none"),
    "hydra.verbose": (_verbose, "hydra.verbose=true, or hydra.verbose=[LOGGER]"),
    "hydra.sweeper.max_batch_size": (_max_batch_size, "leave it out, or hydra.sweeper.max_batch_size=10"),
    "hydra.job.env_set": (_env_set, "+hydra.job.env_set.NAME=VALUE"),
}

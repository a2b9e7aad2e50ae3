"""Which of Hydra's own settings a user may change, and to what. The others could make Hydra import code.

The command line may change more than a file of a settings folder, since the file may come from a stranger.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from gpt2_fp8.config import hints, slurm_launcher
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import show

# `hydra.launcher` and `hydra.sweeper` take the parameters of the plugin that is chosen; never what it is made of.
KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.verbose", "hydra.mode")
PREFIXES = ("hydra.job.", "hydra.launcher.", "hydra.sweeper.")
GROUPS = ("hydra/launcher", "hydra/sweeper", "hydra/job_logging", "hydra/hydra_logging")
_LEVEL = re.compile(r"(job|hydra)_logging\.(root|(loggers|handlers)\.[\w.-]+)\.level")
_MAY = (
    f"{', '.join(KEYS)}, hydra.searchpath, {', '.join(p + '*' for p in PREFIXES)}, hydra.job_logging.root.level and "
    f"{', '.join(GROUPS)} may be set"
)
# What a file may set: folders, what a sweep goes through, and how much is logged.
_IN_A_FILE = re.compile(
    r"run\.dir|sweep\.(dir|subdir)|mode|verbose|sweeper\.(params|max_batch_size|n_trials|n_jobs|direction)|"
    + _LEVEL.pattern
)
_SWEPT = re.compile(r"(?!(hydra|plugins)\b)[A-Za-z]\w*(\.\w+)*")  # a key that a file's sweep may go through
# Which package has a choice that is not there until it is installed.
PACKAGES = {
    "hydra/launcher": {
        "joblib": "hydra-joblib-launcher",
        "ray": "hydra-ray-launcher",
        "ray_aws": "hydra-ray-launcher",
        "rq": "hydra-rq-launcher",
        "submitit_local": "hydra-submitit-launcher",
        "submitit_slurm": "hydra-submitit-launcher",
    },
    "hydra/sweeper": {
        "ax": "hydra-ax-sweeper",
        "nevergrad": "hydra-nevergrad-sweeper",
        "optuna": "hydra-optuna-sweeper",
    },
    "hydra/job_logging": {"colorlog": "hydra-colorlog"},
    "hydra/hydra_logging": {"colorlog": "hydra-colorlog"},
}


def refuse_override(key: str, value: object) -> Problem | None:
    """Return why `hydra.KEY=value` or `hydra/GROUP=value` is refused, or None."""
    if names_code(key, value):
        return Problem(f"{key}: what Hydra builds is not set from the command line", "leave _target_ out")
    if refused := slurm_launcher.refuse_override(key, value):
        return refused
    if key == "hydra.searchpath":
        return _searchpath(value)
    if key == "hydra.job.env_copy":
        return _env_copy(value)
    if key in KEYS or key.startswith((*PREFIXES, *GROUPS)) or _LEVEL.fullmatch(key.removeprefix("hydra.")):
        return None
    return Problem(f"{key} is not a setting of Hydra's that this program leaves open", _MAY)


def may_stand_in_a_file(path: Sequence[str]) -> bool:
    """Return whether a file of a settings folder may set `hydra.PATH`.

    `path` has the keys below the `hydra` node. The keys that a sweep goes through are allowed, since they name no code.
    """
    if tuple(path[:2]) == ("sweeper", "params") and len(path) > 2:
        return len(path) == 3 and bool(_SWEPT.fullmatch(path[2]))
    return bool(_IN_A_FILE.fullmatch(".".join(path)))


def lacks(group: str, name: str, installed: Sequence[str]) -> Problem | None:
    """Return what is missing for a choice of ours that stands on a plug-in, or None."""
    if (group, name) != ("hydra/launcher", slurm_launcher.NAME) or slurm_launcher.BASE in installed:
        return None
    package = PACKAGES[group][slurm_launcher.BASE]
    return Problem(
        f"{group}={name}: {package} is not installed", f'pip install -e ".[slurm]", or pip install {package}'
    )


def missing_plugin(group: str, name: str, installed: Sequence[str]) -> Problem:
    """Say which package brings a plug-in that is not installed: a choice of one of Hydra's groups.

    `installed`: the choices that there are files of; those that lack a package of their own are left out.
    """
    installed = [choice for choice in installed if lacks(group, choice, installed) is None]
    known = PACKAGES.get(group, {})
    cause, remedy = hints.unknown_choice(group, name, sorted({*installed, *known}))
    if package := known.get(name):
        return Problem(cause, f"pip install {package}; installed are {', '.join(installed)}")
    return Problem(
        cause, f"{remedy}; those that are not installed: pip install {', '.join(sorted(set(known.values())))}"
    )


def names_code(key: str, value: object) -> bool:
    """Return whether a key, or a value's keys at any depth, name something for Hydra to import."""
    if {"_target_", "_call_", "()"} & set(key.split(".")):
        return True
    if isinstance(value, dict):
        return any(names_code(str(k), v) for k, v in value.items())
    return isinstance(value, (list, tuple)) and any(names_code("", item) for item in value)


def _searchpath(value: object) -> Problem | None:
    """Check `hydra.searchpath`: Hydra takes a list of texts, and reads only the first such override."""
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
    """Find the values of Hydra's settings that Hydra would accept and then fail on.

    `get` returns the value of a key.
    """
    found = []
    for key, (reason, remedy) in _RULES.items():
        value = get(key)
        if why := reason(value):
            shown = key if isinstance(value, dict) else f"{key}={show(value)}"
            found.append(Finding((key,), Problem(f"{shown}: {why}", remedy)))
    if slurm_launcher.is_chosen(get("hydra.launcher._target_")):
        found += slurm_launcher.check(get)
    return found


def _job_name(value: object) -> str | None:
    """Check `hydra.job.name`, of which the name of the log file is made."""
    name = str(value)
    if not isinstance(value, str) or not name.strip() or name in (".", ".."):
        return "is no name of a file"
    if "/" in name or not name.isprintable():
        return "the log's file has this name, and a name has no / and no control characters"
    return "is too long for a file's name" if len(os.fsencode(name)) > 200 else None


def _output_subdir(value: object) -> str | None:
    """Check the folder into which Hydra writes its files."""
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


def _levels(value: object) -> str | None:
    """Check log levels: Python's logging raises an error for a level that it does not know."""
    nodes = value if isinstance(value, dict) else {}
    entries = [nodes.get("root"), *(entry for name in ("loggers", "handlers") for entry in _entries(nodes.get(name)))]
    levels = [entry["level"] for entry in entries if isinstance(entry, dict) and entry.get("level") is not None]
    bad = [level for level in levels if type(level) is not int and level not in LEVELS]
    return f"the level {show(bad[0])} is none of {', '.join(LEVELS)}" if bad else None


def _entries(node: object) -> list[object]:
    return list(node.values()) if isinstance(node, dict) else []


def _env_set(value: object) -> str | None:
    names = [str(name) for name in value] if isinstance(value, dict) else []
    bad = [name for name in names if not name or "=" in name or not name.isprintable()]
    return f"{show(bad[0])} is no name of a variable" if bad else None


LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
# What a run writes into its folder, which Hydra's own files are to leave alone.
RUN_FILES = ("checkpoints", "tensorboard", "wandb", "remote_runs.json", ".remote_runs.json.tmp",
             "run.log", "metrics.csv", "metrics.csv.tmp", "fp8.csv", "fp8.csv.tmp",
             "summary.json", ".summary.json.tmp", ".lock")  # fmt: skip
_RULES: dict[str, tuple[Callable[[object], str | None], str]] = {
    "hydra.job.name": (_job_name, "choose a plain name, such as hydra.job.name=run"),
    "hydra.output_subdir": (_output_subdir, "a folder in the run's, as hydra.output_subdir=.hydra, or null for none"),
    "hydra.verbose": (_verbose, "hydra.verbose=true, or hydra.verbose=[LOGGER]"),
    "hydra.sweeper.max_batch_size": (_max_batch_size, "leave it out, or hydra.sweeper.max_batch_size=10"),
    "hydra.job_logging": (_levels, "hydra.job_logging.root.level=DEBUG"),
    "hydra.hydra_logging": (_levels, "hydra.hydra_logging.root.level=DEBUG"),
    "hydra.job.env_set": (_env_set, "+hydra.job.env_set.NAME=VALUE"),
}

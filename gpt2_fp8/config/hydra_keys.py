"""Which of Hydra's own settings a user may change. The others could make Hydra import and call what a file names."""

from __future__ import annotations

from gpt2_fp8.config.errors import Problem

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
    if key in KEYS or key in GROUPS or key == "hydra.searchpath" or key.startswith(PREFIXES):
        return None
    return Problem(f"{key} is not a setting of Hydra's that this program leaves open", _MAY)


def names_code(key: str, value: object) -> bool:
    """Whether a key, or a value's keys at any depth, name something for Hydra to import."""
    if {"_target_", "_call_", "()"} & set(key.split(".")):
        return True
    if isinstance(value, dict):
        return any(names_code(str(k), v) for k, v in value.items())
    return isinstance(value, (list, tuple)) and any(names_code("", item) for item in value)


def refuse_content(data: object) -> str | None:
    """What a file of a user's folder holds that only our own may: `_target_` anywhere, or a `hydra` node."""
    if not isinstance(data, dict):
        return None
    if "hydra" in data or any(str(key).startswith("hydra.") for key in data):
        return "a hydra: node"
    defaults = data.get("defaults")
    entries = defaults if isinstance(defaults, list) else []
    if any("hydra" in str(name) for entry in entries for name in (entry if isinstance(entry, dict) else [entry])):
        return "a default of hydra's"
    return "a _target_" if names_code("", data) else None

"""What may be set of `hydra.launcher` when SLURM runs the jobs of a sweep (`hydra/launcher=slurm`), and to what."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gpt2_fp8.config import hints
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import show

NAME, BASE = "slurm", "submitit_slurm"  # our choice, and the plug-in's that it stands on
_CLASS = "SlurmLauncher"
_KEY = "hydra.launcher"
_WHOLE = ("timeout_min", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem_gb", "array_parallelism",
          "cpus_per_gpu", "gpus_per_task")  # fmt: skip
_NAMES = ("partition", "account", "qos", "constraint", "exclude", "gres", "name", "mem_per_gpu", "mem_per_cpu")
# Keys of the plug-in that would do nothing here, or harm.
_REFUSED = {
    "max_num_timeout": "the run itself requeues its job, as often as it takes",
    "submitit_folder": "the table of the sweep waits for what is written there",
}
_CORES = "'export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK'"
_LEAST_DELAY = 10  # seconds
_PLAIN = re.compile(r"[^\s'\"\\]+")


def is_chosen(target: object) -> bool:
    """Return whether the launcher of class `target` is SLURM's."""
    return str(target).endswith(f".{_CLASS}")


def refuse_override(key: str, value: object) -> Problem | None:
    """Return why a key of the launcher may not be set, or None."""
    name = key.removeprefix(f"{_KEY}.").partition(".")[0]
    if key.startswith(f"{_KEY}.") and name in _REFUSED:
        return Problem(f"{key}={show(value)}: {_REFUSED[name]}", f"leave {key} out")
    return None


def unknown(key: str) -> Problem:
    """Return what to say of a key that the launcher does not have."""
    known = [f"{_KEY}.{name}" for name in (*_WHOLE, *_NAMES, "signal_delay_s", "setup", "additional_parameters")]
    near = hints.near(key, known)
    remedy = f"did you mean {hints.either(near)}?" if near else f"+{_KEY}.additional_parameters.OPTION=VALUE for others"
    return Problem(f"there is no key {key}", remedy)


def check(get: Callable[[str], object]) -> Iterator[Finding]:
    """Find the values that submitit or SLURM would refuse after the sweep has begun. `get`: the value of a key."""
    for name in (*_WHOLE, "signal_delay_s"):
        value, least = get(f"{_KEY}.{name}"), _LEAST_DELAY if name == "signal_delay_s" else 1
        if isinstance(value, int) and value < least:
            yield _finding(name, value, f"must be at least {least}", f"choose {least} or more")
    for name in _NAMES:
        value = get(f"{_KEY}.{name}")
        if value is not None and not _PLAIN.fullmatch(str(value)):
            yield _finding(name, value, "is no name that SLURM has", f"{_KEY}.{name}=NAME")
    lines = get(f"{_KEY}.setup")
    for line in lines if isinstance(lines, list) else ():
        if not str(line).isprintable() or not str(line).strip():
            yield _finding("setup", line, "is no line of shell", "one line each, without breaks")
    if isinstance(lines, list) and not any("SRUN_CPUS_PER_TASK" in str(line) for line in lines):
        cause = f"{_KEY}.setup: srun would give each process a single core"
        yield Finding((f"{_KEY}.setup",), Problem(cause, f"begin it with {_CORES}"))
    minutes, delay = get(f"{_KEY}.timeout_min"), get(f"{_KEY}.signal_delay_s")
    if isinstance(minutes, int) and isinstance(delay, int) and 0 < 60 * minutes <= delay:
        reason = f"a run would be asked to save {delay} seconds before that, when it has not begun"
        yield _finding("timeout_min", minutes, reason, f"{_KEY}.timeout_min={delay // 60 + 5}")


def _finding(name: str, value: object, reason: str, remedy: str) -> Finding:
    return Finding((f"{_KEY}.{name}",), Problem(f"{_KEY}.{name}={show(value)}: {reason}", remedy))

"""sbatch's own options, typed as a flag or as a key of `slurm` that there is not: what to type in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.sbatch_schema import INSTEAD, PREFIX

# What the script does not set, and `slurm.options` takes.
_FURTHER = (
    "begin", "comment", "cpus-per-gpu", "deadline", "dependency", "distribution", "exclude", "exclusive", "export",
    "gpu-bind", "hint", "licenses", "mail-type", "mail-user", "mem-per-cpu", "mem-per-gpu", "nice", "nodelist",
    "oversubscribe", "reservation", "switches", "threads-per-core", "tmp",
)  # fmt: skip


def taken_out(words: Sequence[str]) -> Iterator[tuple[range, Problem]]:
    """Yield the places of an option's word, and of its value if that is the next word, with what to say of it."""
    for place, word in enumerate(words):
        bare, _, value = word.lstrip("+~").partition("=")
        flag = bare.startswith("--")
        name = bare.removeprefix("--").removeprefix(f"{PREFIX}.").replace("_", "-")
        if name not in (*_FURTHER, *INSTEAD) or not (flag or bare.startswith(f"{PREFIX}.") or name in _FURTHER):
            continue
        follows = words[place + 1] if place + 1 < len(words) else "="
        apart = flag and not value and "=" not in follows and not follows.startswith("-")
        kind = f"{word} is an option of sbatch" if flag else f"there is no key {bare}"
        yield range(place, place + 1 + apart), Problem(kind, _instead(name, follows if apart else value))


def without(words: Sequence[str], found: Sequence[tuple[range, Problem]]) -> list[str]:
    """Return the words that `taken_out` has not found."""
    gone = {place for places, _ in found for place in places}
    return [word for place, word in enumerate(words) if place not in gone]


def _instead(name: str, value: str) -> str:
    if name in INSTEAD:
        return INSTEAD[name]
    option = f"--{name}" + (f"={value}" if value and value.lower() != "true" else "")
    return f"'{PREFIX}.options=[\"{option}\"]'"

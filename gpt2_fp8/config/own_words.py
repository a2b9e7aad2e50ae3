"""The words of command lines: to type next, made of those that the user has typed, and of a sweep's jobs."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_fp8.config import run_length
from gpt2_fp8.config.keys import value_of
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import as_typed, format_override

RUN = "python -m gpt2_fp8.run"
PLAN = "sweep.json"  # the words of each job that a sweep was to run, so that a table can tell those that did not
_PLACE = ("run_name", "ckpt_path", "hydra.run.dir")


def keys(words: Iterable[str]) -> set[str]:
    """Return the keys and groups that the words of a command line set."""
    return {_key(word) for word in words}


class Typed(NamedTuple):
    """A command line of one run, without the program's name, and the folder where it was typed."""

    words: tuple[str, ...]
    here: Path

    def but(self, left_out: Iterable[str], added: Iterable[str]) -> str:
        """Return the command without the keys `left_out` and what is below them, and with the words `added`."""
        gone = tuple(f"{key}." for key in (*left_out, *map(_key, added)))
        kept = [word for word in self.words if not f"{_key(word)}.".startswith(gone)]
        return shlex.join([*RUN.split(), *kept, *added])


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0] if not word.startswith("-") else word


def continue_command(typed: Typed, folder: Path, limits: Sequence[str] = ()) -> str:
    """Return the command that continues the run in `folder`. `limits`: words that make it longer."""
    return typed.but((*_PLACE, "init_from"), (*_folder_words(folder, typed.here), "ckpt_path=last", *limits))


def resume_words(typed: Typed, folder: Path, limits: Sequence[str] = ()) -> str:
    """Return the words that let the run in `folder` go on, for the line that has started its processes."""
    return shlex.join([*_folder_words(folder, typed.here), "ckpt_path=last", *limits])


def going_on(folder: Path, here: Path, saved: bool, in_sweep: bool = False) -> str:
    """Say how the run in `folder` goes on after an early end. `in_sweep`: its sweep's folder is named, not its own."""
    if not saved:
        return "nothing was saved, and the same command begins again"
    if in_sweep:
        sweep = next((above for above in folder.parents if (above / PLAN).is_file()), folder.parent)
        if sweep.parent == here / "outputs" and folder == sweep / folder.name and folder.name.isdecimal():
            return f"{shlex.quote(format_override('run_name', sweep.name))} ckpt_path=last continues"
        return f"{shlex.quote(format_override('hydra.sweep.dir', str(as_typed(sweep, here))))} ckpt_path=last continues"
    return f"{shlex.join(_folder_words(folder, here))} ckpt_path=last continues"


def twice_as_long(config: RunConfig, ended_by: str | None, steps: int) -> list[str]:
    """Return the words that let a run go on for as long again, at the rate with which its schedule has ended."""
    optim, words = config.optim, []
    reached = [key for key, end in run_length.limits(config).items() if end <= steps]
    for key in dict.fromkeys([*reached, *([ended_by] if ended_by else [])]):
        value: Any = value_of(config, key)
        is_time = key == "trainer.max_time"
        words.append(f"{key}={run_length.as_time(2 * (run_length.seconds(value) or 0)) if is_time else 2 * value}")
    if {ended_by, *reached} - {None, *run_length.EARLY} and 0 < optim.min_lr_ratio < 1:
        rates = ["optim.lr", "optim.embedding_lr", "optim.scalar_lr", "optimizer.matrix_lr"]
        peaks: dict[str, Any] = {key: value_of(config, key) for key in rates}
        words += [f"{key}={peak * optim.min_lr_ratio:.6g}" for key, peak in peaks.items() if peak is not None]
        words += ["optim.schedule=constant", "optim.min_lr_ratio=1"]
        words += ["optim.decay_steps=null"] if optim.decay_steps is not None else []
    return words


def _folder_words(folder: Path, here: Path) -> list[str]:
    if folder.parent == here / "outputs":
        return [format_override("run_name", folder.name)]
    return [format_override("hydra.run.dir", str(as_typed(folder, here)))]


def write_plan(folder: Path, jobs: Sequence[Sequence[str]] | None) -> None:
    """Replace the plan in `folder`, which may not exist yet. `jobs`: None if nobody knows them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{PLAN}.tmp"
    temporary.write_text(json.dumps({"jobs": jobs}, indent=1))
    os.replace(temporary, folder / PLAN)


def varied_keys(folder: Path) -> set[str]:
    """Return the keys in which the jobs of the sweep in `folder` differ, by its plan; none without one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        jobs = [set(words) for words in json.loads((folder / PLAN).read_bytes())["jobs"]]
        return keys(set.union(*jobs) - set.intersection(*jobs))
    return set()

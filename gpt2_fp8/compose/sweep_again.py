"""A sweep that is continued: whether each job goes on by its own words, in the folder where it has begun.

A job's folder is its number, unless a word says otherwise. So values in another order would give it another job's run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.types import Override

from gpt2_fp8.compose import complete_run
from gpt2_fp8.compose.sweep_folders import Place
from gpt2_fp8.config import bounded, sweep_plan
from gpt2_fp8.config.errors import Finding
from gpt2_fp8.config.shown import line
from gpt2_fp8.config.typed import meant

_LARGEST = 1 << 16  # bytes of a file with a job's words
_MOST = 1000  # jobs that are looked at
_MAY_CHANGE = ("ckpt_path", "init_from", "run_name", "trainer.max_")  # what a resume sets, or makes longer

Words = Mapping[str, str]  # each by its key


def check(jobs: Sequence[tuple[Place, Sequence[Override]]]) -> Iterator[Finding]:
    """Find jobs that would continue what another job has begun, by the words of both. `jobs`: each with its words."""
    begun = {path: words for above in {Path(place.folder).parent for place, _ in jobs} for path, words in _begun(above)}
    tell = [key for key in {key: None for words in begun.values() for key in words} if _tells(key, begun)]
    for place, typed in jobs:
        was, now = begun.get(Path(os.path.realpath(place.folder))), _by_key([str(word.input_line) for word in typed])
        changed = [key for key in tell if was is not None and _value(now, key) != _value(was, key)]
        others = [path for path, words in begun.items() if all(_value(now, key) == _value(words, key) for key in tell)]
        if was is not None and changed and others:
            before, after = (", ".join(words.get(key, f"without {key}") for key in changed) for words in (was, now))
            cause = f"ckpt_path: job {place.number} was {before}, and would go on as {after}, as {others[0].name} was"
            remedy = "type the sweep's values in the order in which it began; another run_name begins another sweep"
            yield Finding.of("ckpt_path", line(cause), remedy)


def _begun(above: Path) -> Iterator[tuple[Path, Words]]:
    """Yield the folder of each job that has begun below `above`, and its words.

    These are its summary's, which a job that was refused later does not replace, or those that Hydra has written.
    """
    for file in sorted(above.glob("*/.hydra/overrides.yaml"))[:_MOST]:
        found: Any = complete_run.summary(file.parents[1]).get("overrides")
        with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
            if not found and bounded.regular_file(file).st_size <= _LARGEST:
                found = yaml.safe_load(file.read_text(encoding="utf-8"))
        if sweep_plan.is_words(found):
            yield Path(os.path.realpath(file.parents[1])), _by_key(found)


def _by_key(words: Sequence[str]) -> Words:
    return {word.partition("=")[0].lstrip("+"): word for word in words}


def _value(words: Words, key: str) -> str | float | None:
    """Return what a key is set to, to compare it; None if no word sets it."""
    return meant(words[key].partition("=")[2]) if key in words else None


def _tells(key: str, begun: Mapping[Path, Words]) -> bool:
    """Return whether a key tells jobs that have begun apart."""
    return not key.startswith(_MAY_CHANGE) and len({_value(words, key) for words in begun.values()}) > 1

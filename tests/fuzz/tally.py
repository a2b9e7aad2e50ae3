"""Trying many inputs of a class, and counting: tried, held, and how each ended."""

from __future__ import annotations

import itertools
import json
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.internal.conjecture import providers

from tests.fuzz import checkpoints, logs, pointers, settings, texts
from tests.fuzz.place import Place
from tests.fuzz.program import Program
from tests.fuzz.promise import Broken

CLASSES: dict[str, ModuleType] = {
    "settings": settings, "checkpoints": checkpoints, "pointers": pointers, "logs": logs, "data files": texts,
}  # fmt: skip
_TYPED_EVERY = 40  # of so many inputs one is tried as a command in a process of its own
_LONG = 1500  # characters of an input that is printed
_ROUND = 3  # inputs that are drawn with one seed: the simplest, a random one, and often that with a change


@dataclass
class Tally:
    """What has come of a class of input."""

    name: str
    tried: int = 0
    ends: Counter[str] = field(default_factory=Counter)  # of those that held: by exit code
    broken: list[str] = field(default_factory=list)  # why, and how to try it again

    @property
    def held(self) -> int:
        """How many ended as they may."""
        return self.tried - len(self.broken)


def tally(
    name: str,
    seed: int,
    most: int | None = None,
    seconds: float | None = None,
    say: Callable[[str], None] = lambda told: None,
) -> Tally:
    """Try inputs of the class `name` until there were `most`, or `seconds` are over; the n-th depends on `seed` alone.

    What does not hold is said at once.
    """
    found, end = Tally(name), time.monotonic() + (seconds if seconds is not None else float("inf"))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        place = Place(Path(folder), Program())
        for case in drawn(name, seed, most):
            if time.monotonic() > end:
                break
            found.tried += 1
            try:
                found.ends[try_case(name, case, place, typed=found.tried % _TYPED_EVERY == 0)] += 1
            except Broken as why:
                found.broken.append(f"{why}\n    python -m tests.fuzz.count --again {shlex.quote(name)} {_words(case)}")
                say(found.broken[-1])
    return found


def _words(case: dict[str, Any]) -> str:
    """An input as a word of a command line; a long one is kept in a file."""
    text = json.dumps(case)
    if len(text) <= _LONG:
        return shlex.quote(text)
    with tempfile.NamedTemporaryFile("w", prefix="fuzz-input-", suffix=".json", delete=False) as file:
        file.write(text)
    return f"@{file.name}"


def try_case(name: str, case: dict[str, Any], place: Place, typed: bool = False) -> str:
    """Try one input; returns its exit code. Raises `Broken`."""
    place.clear()
    return str(CLASSES[name].try_one(case, place, typed))


def drawn(name: str, seed: int, most: int | None) -> Iterator[dict[str, Any]]:
    """Inputs, no two alike, in rounds: Hypothesis draws each round's from a seed of its own."""
    seen: set[str] = set()
    for number in itertools.count():
        for case in _round(CLASSES[name].CASES, 1000 * seed + number):
            if most is not None and len(seen) == most:
                return
            if (text := json.dumps(case)) not in seen:
                seen.add(text)
                yield case


def _round(strategy: Any, seed: int) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=_ROUND, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @hypothesis.given(strategy)
    def draw(case: dict[str, Any]) -> None:
        cases.append(json.loads(json.dumps(case)))  # as `count --again` will have it

    # Of itself Hypothesis also draws constants that it finds in whatever modules are imported: other inputs in another
    # process, and after each change of the program.
    with mock.patch.object(providers, "_get_local_constants", providers.Constants):
        draw()
    return cases


def table(tallies: list[Tally]) -> str:
    """The counts as Markdown."""
    lines = [
        "| input | tried | held | of these went on | refused (2) | other known ends |",
        "|---|---|---|---|---|---|",
    ]
    for one in tallies:
        known = one.ends["0"], one.ends["2"], one.ends.total() - one.ends["0"] - one.ends["2"]
        lines.append(f"| {one.name} | {one.tried} | {one.held} | {known[0]} | {known[1]} | {known[2]} |")
    return "\n".join(lines)

"""The conditions of a study: reads their file, composes each one's words, and refuses what is not one run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hydra.errors import HydraException

from gpt2_fp8 import compose
from gpt2_fp8.compose import benchmark_rows, commandline
from gpt2_fp8.compose.override_parser import parsed
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig
from gpt2_fp8.config.schema import RunConfig

STOP = "stop_at"  # stop_at.py, and what it registers
SEVERAL = "-m", "--multirun"
A_ROW_EACH = "name a file with a row each: --conditions FILE"
Problems = dict[Problem, str]  # each with the first condition that has it


@dataclass(frozen=True)
class Leg:
    """A part of a run with its own words. `until`: the step after which the next leg continues; None: its end.

    `added`: the words that the study adds (`with_own_words`).
    """

    words: tuple[str, ...]
    until: int | None = None
    added: tuple[str, ...] = ()

    @classmethod
    def parse(cls, given: Sequence[str]) -> tuple[Leg, ...]:
        """Return the legs of a condition: `WORDS @STEP WORDS ...`."""
        parts: list[list[str]] = [[]]
        marks: list[int | None] = []
        for word in given:
            if re.fullmatch(r"@[0-9]{1,12}", word):
                marks.append(int(word[1:]))
                parts.append([])
            else:
                parts[-1].append(word)
        return tuple(cls(tuple(words), until) for words, until in zip(parts, [*marks, None], strict=True))

    def with_own_words(self, config: RunConfig) -> Leg:
        """Return the leg with the words that make it fail rather than fall back, and stop after its last step.

        `config`: what its own words come to.
        """
        added = ["precision.fallback=error"] if isinstance(config.precision, FP8PrecisionConfig) else []
        if self.until is not None:
            for key, there in (("plugins", config.plugins), ("callbacks.extra", config.callbacks.extra)):
                added.append(f"{key}=[{','.join(compose.quoted(name) for name in dict.fromkeys([*there, STOP]))}]")
            added.append(f"+tags.{STOP}={self.until}")
        return replace(self, added=tuple(added))


def read(file: str) -> dict[str, tuple[Leg, ...]]:
    """Return the legs of every condition of a file by its name, in its order. Raises UserError."""
    problems: list[Problem] = []
    rows = benchmark_rows.read(file, problems, "--conditions")
    if problems:
        raise UserError(problems)
    return {row.name: Leg.parse(row.words) for row in rows}


def folder_name(name: str) -> str:
    """Return the name of a condition's folder."""
    return re.sub(r"[^\w+.-]+", "_", name)


def refuse_shared_folders(names: Sequence[str], taken: Mapping[str, str]) -> None:
    """Raise UserError if two conditions would have one folder, or one that is something else: `taken` says what."""
    problems, owners = [], dict(taken)
    for name in names:
        folder = folder_name(name)
        owner = "the study's own folder, or one above it" if not folder.strip(".") else owners.get(folder)
        if owner is not None:
            problems.append(Problem(f"{name}: its folder {folder} is {owner}", "give the condition another name"))
        owners[folder] = f"that of {name} too"
    if problems:
        raise UserError(problems)


def composed(
    name: str, words: Sequence[str], kept: Mapping[str, str], problems: Problems, own: Sequence[str] = ()
) -> RunConfig | None:
    """Return what the words of a condition come to; None after adding to `problems` what is wrong with them.

    `kept`: keys that the study sets itself, each with what to do instead. `own`: its words for some of them.
    """
    found = list(_no_single_run(list(words), kept))
    if not found:
        try:
            return compose.preflight([*words, *own])[0]
        except UserError as error:
            found = error.problems
    for problem in found:
        problems.setdefault(problem, name)
    return None


def refuse(problems: Problems) -> None:
    """Raise UserError if there are problems. Each begins with the name of its condition."""
    if problems:
        raise UserError(Problem(f"{name}: {cause}", remedy) for (cause, remedy), name in problems.items())


def _no_single_run(words: list[str], kept: Mapping[str, str]) -> Iterator[Problem]:
    """Yield why words are not those of one run that the study starts."""
    if compose.is_help(words):
        yield Problem("its words ask for help or settings, and no run begins", "leave the flag out")
        return
    first = next((place for place, word in enumerate(words) if not word.startswith("-") and "=" in word), len(words))
    if late := [word for word in words[first:] if word.startswith("-") and word not in SEVERAL]:
        yield Problem(f"{late[0]} stands behind other words", "write flags first, right behind --")
        return
    line, problems = commandline.read([word for word in words if word not in SEVERAL])
    yield from problems
    if any(word in SEVERAL for word in words):
        yield Problem("-m asks for several runs, and a condition is one", f"leave -m out, and {A_ROW_EACH}")
    for word in line.words:
        with suppress(HydraException, ValueError, OverflowError, RecursionError):  # said when it is composed
            override = parsed(word)
            if override.is_sweep_override():
                yield Problem(f"{word} is several values, and a condition is one run", A_ROW_EACH)
            elif override.key_or_group == "hydra.mode":
                yield Problem(f"{word}: a condition is one run", "leave it out")
    yield from overridden(line.words, kept)


def overridden(words: Sequence[str], kept: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the words that would have no effect, since the study sets their keys."""
    for word, key in keyed(words):
        if key in kept:
            yield Problem(f"{word}: the study sets {key} itself", kept[key])


def keyed(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the words that set something, each with its key."""
    for word in words:
        with suppress(HydraException, ValueError, OverflowError, RecursionError):
            yield word, parsed(word).key_or_group

"""Composition by Hydra, repeated without the words that Hydra refuses.

Hydra stops at the first mistake. Here every mistake is reported at once, in this program's own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf.errors import OmegaConfBaseException

from gpt2_fp8.compose import refusals
from gpt2_fp8.compose.catalog import Catalog, Composed, RefusedError
from gpt2_fp8.compose.override_parser import parsed
from gpt2_fp8.compose.request import Request
from gpt2_fp8.config import hints, slurm_launcher
from gpt2_fp8.config.errors import Finding, Problem, UserError
from gpt2_fp8.config.keys import key_paths
from gpt2_fp8.config.schema import RunConfig


class Composer:
    """Composes the words of a request, and of each job of a sweep.

    Attributes:
        found: what was wrong with the words that are left out.
        absent: values for keys that none of the chosen files has. They are added, so that the schema can judge them.
    """

    def __init__(self, request: Request, catalog: Catalog):
        self.request, self.catalog = request, catalog
        self.found: list[Finding] = []
        self.absent: list[Override] = []
        self.unresolved: list[str] = []
        self._instead: dict[str, Override | None] = {}  # replaces words that Hydra refuses; None: nothing does

    def compose(self, words: Sequence[Override]) -> tuple[Composed, list[Override]]:
        """Compose those of `words` that Hydra takes, and return the result with these words.

        Raises UserError if nothing can be composed, or if a file does what only the command line may.
        """
        kept = self._standing(words)
        kept.sort(key=lambda word: (not self._chooses(word), not word.is_hydra_override()))
        while True:
            try:
                return self.catalog.compose(_lines(kept)), kept
            except RefusedError as refused:
                self._refuse(kept, *self._first_refused(kept, refused.__cause__))
                kept = self._standing(kept)

    def base(self, words: Sequence[Override]) -> dict[str, Any]:
        """Return what the choices among `words` compose to, as plain values; an empty dictionary if they do not."""
        try:
            return self.catalog.compose(_lines(list(filter(self._chooses, words)))).plain
        except RefusedError:
            return {}

    def _standing(self, words: Sequence[Override]) -> list[Override]:
        """Return the words without those that were refused before, or with their replacements."""
        return [new for word in words if (new := self._instead.get(str(word.input_line), word)) is not None]

    def _chooses(self, word: Override) -> bool:
        return self.catalog.is_group(word) or word.key_or_group.startswith("hydra/")

    def _first_refused(
        self, words: list[Override], error: BaseException | None
    ) -> tuple[Override, BaseException | None]:
        """Find the word that Hydra refuses, and what Hydra says of it.

        The message may name the word. Otherwise it is found by composing fewer words.
        """
        if named := refusals.named(words, error) or refusals.chooser(list(filter(self._chooses, words)), error):
            return named, error
        choices = sum(map(self._chooses, words))
        good, bad = 0, len(words)
        if choices and self._refusal(words[:choices]) is None:
            good = choices  # the choices compose together, though perhaps not one by one
        elif choices:
            bad = choices
        if good == 0 and (said := self._refusal([])):
            raise UserError([refusals.not_composed(said)])
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self._refusal(words[:middle]) is None else (good, middle)
        return words[bad - 1], self._refusal(words[:bad]) or error

    def _refusal(self, words: list[Override]) -> BaseException | None:
        try:
            self.catalog.compose(_lines(words))
        except RefusedError as refused:
            return refused.__cause__ or refused
        return None

    def _refuse(self, words: list[Override], word: Override, error: BaseException | None) -> None:
        """Leave out a word that Hydra refuses, or replace it, and note why."""
        key, text = word.key_or_group, str(word.input_line)
        self._instead[text] = None
        if self._chooses(word):
            self.request.refused_groups.add(key)
            if not self.catalog.refused_folders:  # the choice may be there, in a folder that was refused
                self._note(key, refusals.bad_choice(word, error, self.catalog))
        elif word.is_hydra_override():
            cause, remedy = refusals.not_composed(error)
            if key.startswith("hydra.sweeper.params"):  # Hydra adds none to a sweep that has none
                remedy = "-m KEY=VALUE,VALUE types a sweep; hydra.sweeper.params stands in a file"
            problem = Problem(cause, f"{remedy}; or leave out {text}")
            if key.startswith("hydra.job.env") and "Could not override" in str(error):
                problem = Problem(f"{text}: {key} is not there yet", f"+{text}, to add it")
            elif "not in 'SlurmQueueConf'" in cause:
                problem = slurm_launcher.unknown(key)
            self._note(key, problem)
        elif "Could not override" in str(error) and not lookup(base := self.base(words), key)[0]:
            for other in words:  # Hydra would say the same of each such word
                if not self._chooses(other) and not lookup(base, other.key_or_group)[0]:
                    self._add(other, base)
        else:
            if refusals.is_there_already(error):  # the value may be wrong too
                self._instead[text] = parsed(text.lstrip("+"))
            self._note(key, refusals.bad_value(word, error))

    def _add(self, word: Override, base: dict[str, Any]) -> None:
        """Add a key that none of the chosen files has, so that the schema can say what is wrong with it."""
        key, text = word.key_or_group, str(word.input_line)
        if text.startswith("+") or word.is_hydra_override():
            return
        self._instead[text] = None
        if (single := _single_value_above(base, key)) is not None:
            cause, remedy = f"there is no key {key}: {single} is a single value", f"{single}=VALUE"
            if single == "data.weights":  # null until it is given, as a whole
                cause, remedy = f"there is no key {key} yet: the weights are given together", hints.VALUES[single]
            if single in hints.UNCHOSEN:
                cause, remedy = f"there is no key {key}: this logger is not chosen", hints.UNCHOSEN[single]
            self._note(key, Problem(cause, remedy))
        elif not (self.request.doubts(key) and key in key_paths(RunConfig)):  # which may be a refused choice's
            self._instead[text] = parsed(f"++{text}")
            self.absent.append(word)

    def _note(self, key: str, problem: Problem) -> None:
        self.found.append(Finding((key,), problem))

    def drop_unresolved(self, words: Sequence[Override], error: OmegaConfBaseException) -> list[Override]:
        """Return the words without the one whose `${...}` does not resolve.

        Raises UserError if it is in none of them.
        """
        key, reason = str(error.full_key), str(error).splitlines()[0]
        self.unresolved.append(key)
        self._note(key, Problem(f"{key}: {reason}", "correct the ${...}, or write \\${ for the signs themselves"))
        left = [word for word in words if word.key_or_group != key]
        if len(left) == len(words):
            raise UserError(finding.problem for finding in self.found)
        return left


def _lines(words: list[Override]) -> list[str]:
    return [str(word.input_line) for word in words]


def lookup(node: Any, key: str) -> tuple[bool, Any]:
    """Return whether a plain configuration has a key, and its value with `${...}` as written."""
    for part in filter(None, key.split(".")):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return False, None
    return True, node


def above(key: str) -> list[str]:
    """Return a key and the keys above it: `a.b.c`, `a.b` and `a`."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _single_value_above(base: dict[str, Any], key: str) -> str | None:
    """Return the longest existing part of a key if that is a single value, else None."""
    there = next((part for part in above(key)[1:] if lookup(base, part)[0]), None)
    return there if there and not isinstance(lookup(base, there)[1], (dict, list)) else None

"""What Hydra says of a word that it refuses, translated into this program's words."""

from __future__ import annotations

import re

from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException

from gpt2_fp8.compose.catalog import Catalog
from gpt2_fp8.config import hints
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.shown import line

# How Hydra's messages name a word.
_NAMES = re.compile(
    r"(?:Could not override|An item is already at) '([^']*)'|Multiple values for (\S+)\.|Error merging override (.*)$"
)


def named(words: list[Override], error: BaseException | None) -> Override | None:
    """Return the word that Hydra's message names, by its key or as a whole; None if it names none."""
    said = _NAMES.search(str(error))
    names = set(said.groups()) if said else set()
    return next((word for word in reversed(words) if {word.input_line, word.key_or_group} & names), None)


def chooser(words: list[Override], error: BaseException | None) -> Override | None:
    """Return the word that chooses a missing file, by its group or by the file's name (`optim: ${model}`)."""
    if not isinstance(error, MissingConfigException):
        return None
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    by_group = [word for word in words if f"{group}/".startswith(f"{word.key_or_group}/")]
    by_name = [word for word in words if word.value() == name]
    both = [word for word in by_group if word.value() == name]  # a group may be chosen from for several places
    return next(reversed(both or by_group or by_name), None)


def bad_choice(word: Override, error: BaseException | None, catalog: Catalog) -> Problem:
    """Say what is wrong with a word that chooses from a group."""
    group, text = word.key_or_group, str(word.input_line)
    if isinstance(error, MissingConfigException):
        folder, _, name = str(error.missing_cfg_file).rpartition("/")
        if folder != group and not folder.startswith(f"{group}/"):
            have = ", ".join(catalog.get_group_options(folder))
            if name != word.value():
                return Problem(f"{text}: its file names {folder}/{name}, which is not there", f"choose one of {have}")
            cause = f"{text}: no {folder}/{name}.yaml, where {folder} follows {group}"
            return Problem(cause, f"add {folder}=, one of {have}")
        below = folder.removeprefix(group).lstrip("/")
        options = [f"{below}/{option}" for option in catalog.get_group_options(folder)] if below else []
        choice = f"{below}/{name}" if below else name
        return Problem(*hints.unknown_choice(group, choice, options or catalog.get_group_options(group)))
    if "Multiple values for" in str(error):
        return Problem(f"{text}: {group} has its place already", f"{text.lstrip('+')}, without the +")
    if "Could not override" in str(error) and word.package:
        return Problem(f"{text}: no file that was chosen has {word.package}", f"+{text}, to add it")
    if "Could not override" in str(error):
        return Problem(f"{text}: {group} is no group of this program's own", f"+{text}, to add it")
    return not_composed(error)


def is_there_already(error: BaseException | None) -> bool:
    """Return whether Hydra refuses to add a key because it has a value."""
    return "An item is already at" in str(error)


def bad_value(word: Override, error: BaseException | None) -> Problem:
    """Say what is wrong with a word that sets a value."""
    key, text = word.key_or_group, str(word.input_line)
    if is_there_already(error):
        return Problem(f"{text}: {key} has a value already", f"{text.lstrip('+')}, without the +")
    if "Could not override" in str(error):
        remedy = hints.unchosen(key, word.value()) or f"+{text}, to add them"
        return Problem(f"{text}: {key} has no such keys", remedy)
    if error is not None and error.__cause__ is not None:  # OmegaConf's message says why
        error = error.__cause__
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "Cannot merge" in reason:  # a list where there are keys
        return _no_list(key, text, word.value())
    return Problem(f"{text.lstrip('+')} cannot be set: {reason}", f"set the whole of {key.rpartition('.')[0] or key}")


def _no_list(key: str, text: str, typed: object) -> Problem:
    """Say that a key has keys of its own, and no list; a list of tags is meant as tags that are set."""
    names = [name for name in typed if str(name).isidentifier()] if isinstance(typed, list) else []
    if key == "tags":
        remedy = " ".join(f"+tags.{name}=true" for name in names) or "+tags.KEY=VALUE"
    else:
        remedy = hints.unchosen(key, typed) or f"{key}.KEY=VALUE"
    return Problem(f"{text}: {key} has keys with values, and is no list", remedy)


def not_composed(error: BaseException | None) -> Problem:
    """Repeat Hydra's message in one line, if nothing better is known."""
    cause = error.__cause__ if error and not str(error) and error.__cause__ else error
    lines = [text.strip() for text in f"{cause} {cause.__cause__ or '' if cause else ''}".splitlines() if text.strip()]
    said = line(" ".join(lines[:3]), 500)
    return Problem(
        f"the configuration cannot be composed: {said}",
        "correct the file that it names, or the choice that leads there",
    )

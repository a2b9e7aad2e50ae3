"""A file of HellaSwag's form (Zellers et al. 2019): beginnings, several endings of each, and which one is right."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from gpt2_fp8.config import text_file
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show

_FORM = 'each line is {"ctx": TEXT, "endings": [TEXT, TEXT, ...], "label": NUMBER OF THE RIGHT ONE, FROM 0}'
_OF_HELLASWAG = ("activity_label", "ctx_a", "ctx_b")


class Item(NamedTuple):
    """A beginning, its endings without the blank in front of them, and the place of the right one."""

    context: str
    endings: tuple[str, ...]
    label: int


def read(file: str, problems: list[Problem]) -> list[Item]:
    """Return the items of a file. What is wrong is added to `problems`, each line by its number."""
    before = len(problems)
    text = text_file.read("ranking", file, _FORM, problems)
    items = []
    for number, line in text_file.json_lines(text):
        try:
            items.append(_item(json.loads(line)))
        except (ValueError, RecursionError) as error:
            problems.append(Problem(f"ranking={show(file)}, line {number}: {error}", _FORM))
    if not items and len(problems) == before:
        problems.append(Problem(f"ranking={show(file)} holds no line", _FORM))
    return items


def _item(row: Any) -> Item:
    """Check a line, and prepare one of HellaSwag's own file. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    ours = all(isinstance(row.get(key), str) for key in _OF_HELLASWAG)
    context, endings, label = row.get("ctx"), row.get("endings"), row.get("label")
    if ours:
        context = _cleaned(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    if not isinstance(context, str):
        raise ValueError('it has no text under "ctx"')
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(e, str) and e.strip() for e in endings):
        raise ValueError('it has no list of two texts or more under "endings"')
    if isinstance(label, str) and label.isascii() and label.isdigit():  # as the hub's copy has it
        label = int(label)
    if type(label) is not int or not 0 <= label < len(endings):
        raise ValueError(f'its "label" is {show(str(label))}, and not from 0 to {len(endings) - 1}')
    if ours:
        endings = list(map(_cleaned, endings))
        if not all(endings):
            raise ValueError("an ending is only a note in brackets")
    for text in (context, *endings):
        text.encode()  # UnicodeEncodeError is a ValueError: half of a surrogate pair
    return Item(context, tuple(endings), label)


def _cleaned(text: str) -> str:
    """Prepare a text of HellaSwag's own file as lm-eval does: without what WikiHow's pages have in brackets."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

"""A study's note in its folder, `study.json`: what its runs were given. So none of them gets another meaning later."""

from __future__ import annotations

import os
from typing import Any

import rows
from gap_jobs import Study

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config import bounded, output_folder
from gpt2_fp8.config.errors import UserError

ANOTHER = "name a new folder for the study"


def keep(study: Study) -> None:
    """Write the note; make the folder. Raises UserError if it holds runs of other words, or cannot be written."""
    path, given = study.folder / "study.json", _given(study)
    if found := output_folder.check(study.folder, "FOLDER"):
        raise UserError.of(found[0].problem.cause, "name a folder that can be written, as the first word")
    before = _read(study)
    _refuse_others(study, given, before)
    given["conditions"] = before.get("conditions", {}) | given["conditions"]
    rows.refuse_shared_folders(list(given["conditions"]), study.taken)
    try:
        study.folder.mkdir(parents=True, exist_ok=True)
        durable.write_json(path, given)
    except OSError as error:
        raise UserError.of(f"{path} cannot be written: {error.strerror or error}", ANOTHER) from None


def _given(study: Study) -> dict[str, Any]:
    conditions = {}
    for name, legs in study.conditions.items():
        marked = [[*leg.words, *([] if leg.until is None else [f"@{leg.until}"])] for leg in legs]
        conditions[name] = [word for words in marked for word in words]
    start = None if study.start is None else {"step": study.start, "words": list(study.start_words)}
    return {"words": list(study.words), "from": start, "conditions": conditions}


def _read(study: Study) -> dict[str, Any]:
    """Return the note of before; empty if there is none. Earlier versions noted the words alone."""
    path = study.folder / "study.json"
    if not os.path.lexists(path):
        return {}
    try:
        found = bounded.read_json(path)
        if not isinstance(found, dict) or "words" not in found or not isinstance(found.get("conditions", {}), dict):
            raise ValueError("it lacks what a study notes")
    except (OSError, ValueError) as error:
        raise UserError.of(f"{path} cannot be read: {error}", ANOTHER) from None
    return found


def _refuse_others(study: Study, given: dict[str, Any], before: dict[str, Any]) -> None:
    if not before:
        return
    note = study.folder / "study.json"
    if before["words"] != given["words"]:
        raise UserError.of(f"{study.folder} holds runs that were given other words: see {note}", ANOTHER)
    if before.get("from") != given["from"]:
        raise UserError.of(f"{study.folder} holds runs that began elsewhere (--from): see {note}", ANOTHER)
    was = before.get("conditions", {})
    for name, words in given["conditions"].items():
        if was.get(name, words) != words:
            cause = f"{name}: {study.folder} holds runs of that name that were given other words: see {note}"
            raise UserError.of(cause, "give the condition a new name")

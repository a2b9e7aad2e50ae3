"""`last.json`, `best.json`, `validation.json` and the names of steps' folders: damaged, or telling what is not so."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.damage import DAMAGE, damage
from tests.fuzz.place import Place
from tests.fuzz.run_folder import ON, STEPS, continued, lay, true_losses

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=True), st.text(max_size=12), st.integers(-2, 6),
    st.sampled_from([
        "step-00000001", "step-00000002", "step-00000003", "step-00000009", "step-1",
        "../run/checkpoints/step-00000002",
        "/etc", ".", "", "step-00000002/", "step-" + "9" * 15, "step-" + "9" * 400, "\x1b[2J", "x" * 5000, 10**400, [],
        {}, [[]],
    ]),
)  # fmt: skip
FILES = st.sampled_from(
    [
        "last.json",
        "last.json",
        "best.json",
        "best.json",
        "step-00000003/validation.json",
        "step-00000001/validation.json",
    ]
)
FOLDERS = st.sampled_from(["swap", "swap", "rename", "copy", "empty", "file", "link", "gone", "old"])


FLIP = st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(0, 7)).map(lambda one: [list(one)])


@st.composite
def _cases(draw: Any) -> dict[str, Any]:
    how = draw(st.integers(0, 9))
    one = draw(st.integers(1, STEPS))
    return {
        "file": draw(FILES),
        "values": draw(st.dictionaries(st.sampled_from(["checkpoint", "step", "val_loss", "x"]), VALUES, min_size=1))
        if how < 3
        else {},
        "take": draw(st.lists(st.sampled_from(["checkpoint", "step", "val_loss"]), max_size=1)) if how < 3 else [],
        "damage": draw(st.one_of(FLIP, FLIP, st.lists(DAMAGE, min_size=1, max_size=2))) if 3 <= how < 7 else [],
        "folders": draw(FOLDERS) if how >= 7 else "",
        "steps": [one, one % STEPS + 1 if draw(st.booleans()) else draw(st.integers(1, STEPS + 2))],
        "ckpt_path": draw(st.sampled_from(["last", "last", "best"])),
    }


CASES = _cases()


def try_one(case: dict[str, Any], place: Place, typed: bool = False) -> str:
    """Continue the run. What it goes on from is what it says, and its best stays the best that it had, or a later."""
    folder = lay(place) / "checkpoints"
    path = folder / case["file"]
    if case["values"] or case["take"]:
        value = json.loads(path.read_text()) | case["values"]
        for key in case["take"]:
            value.pop(key, None)
        path.write_text(json.dumps(value))
    elif case["damage"]:
        path.write_bytes(damage(path.read_bytes(), case["damage"]))
    else:
        _move(folder, case["folders"], *(folder / f"step-{step:08d}" for step in case["steps"]), place)
    outcome = place.run(*ON, f"ckpt_path={case['ckpt_path']}", typed=typed)
    if outcome.code == 0 and not typed:
        place.expect(continued(outcome, place), "a run that was to be continued has not begun")
    if outcome.code == 0 and case["damage"]:
        _best_is_true(folder, place)
    return str(outcome.code)


def _move(folder: Path, what: str, one: Path, other: Path, place: Place) -> None:
    aside = folder / "aside"
    if what == "swap" and other.exists():
        os.rename(one, aside)
        if one != other:
            os.rename(other, one)
        os.rename(aside, other)
    elif what in ("rename", "copy", "link") and not other.exists():
        shutil.copytree(one, other) if what == "copy" else os.rename(one, other)
        if what == "link":
            one.symlink_to(other.name)
    elif what == "old":
        os.rename(one, folder / f".{one.name}.old")
    elif what in ("gone", "empty", "file"):
        shutil.rmtree(one)
        if what == "empty":
            one.mkdir()
        elif what == "file":
            one.touch()


def _best_is_true(folder: Path, place: Place) -> None:
    """`best.json` has the loss that its step had."""
    path = folder / "best.json"
    if not path.exists():
        return
    try:
        best = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        best = None
    place.expect(isinstance(best, dict) and "step" in best, "best.json stays damaged")
    if (step := best["step"]) in true_losses():
        place.expect(best["val_loss"] == true_losses()[step], f"best.json has {best['val_loss']!a} for step {step}")

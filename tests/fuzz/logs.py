"""A run's logs and other small files, damaged or replaced by what should not be there: a run is continued all the same,
and its log goes on."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.damage import DAMAGE, damage
from tests.fuzz.place import Place
from tests.fuzz.promise import REFUSED
from tests.fuzz.run_folder import ON, STEPS, continued, lay

METRICS = "metrics.csv"
NAMES = st.sampled_from(
    [METRICS] * 6 + ["summary.json", "run.log", ".lock", ".hydra/config.yaml", ".summary.json.tmp", "metrics.csv.tmp"]
)
LINES = st.sampled_from([
    "", ",", '"', '"open', "4", "step", "step,train_loss", "9" * 5000 + ",1", "1e3,1", "-1,1", "4,nan,inf",
    ",".join("0" * 60),
    "\ufeffstep", "٣,1", "²,1", "x" * 140_000, '"' + "x\n" * 70_000 + '"', "\0", "\x1b[2J", "'=1+1", "4;5", "5\r",
    "\u2028",
])  # fmt: skip
ODD = st.sampled_from(["folder", "link", "dangling", "pipe", "gone", "unreadable"])


@st.composite
def _cases(draw: Any) -> dict[str, Any]:
    name = draw(NAMES)
    how = draw(st.integers(0, 9))
    return {
        "name": name,
        "odd": draw(ODD) if how == 0 or (name != METRICS and how < 7) else "",
        "lines": draw(st.lists(st.tuples(st.integers(0, 9), LINES), min_size=1, max_size=3))
        if how in (1, 2, 3)
        else [],
        "damage": draw(st.lists(DAMAGE, min_size=1, max_size=2)) if how > 3 else [],
    }


CASES = _cases()


def try_one(case: dict[str, Any], place: Place, typed: bool = False) -> str:
    """Continue the run for a step."""
    run = lay(place)
    path = run / case["name"]
    path.parent.mkdir(exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    if case["odd"]:
        _put_odd(path, case["odd"], place)
    else:
        path.write_bytes(damage(_with_lines(before, case["lines"]), case["damage"]))
    outcome = place.run(*ON, "ckpt_path=last", typed=typed)
    if outcome.code == 0:
        place.expect(typed or continued(outcome, place) == STEPS, "not continued from the last step")
        if case["name"] == METRICS or not case["odd"]:
            _goes_on(run, place)
    else:
        place.expect(
            case["odd"] and outcome.code == REFUSED, f"exit {outcome.code} for a log: {outcome.stderr[:300]!a}"
        )
    return str(outcome.code)


def _with_lines(content: bytes, lines: list[list[Any]]) -> bytes:
    rows = content.decode("utf-8", "surrogateescape").splitlines(keepends=True)
    for at, line in lines:
        rows.insert(at, line + "\n")
    return "".join(rows).encode("utf-8", "surrogateescape")


def _put_odd(path: Path, what: str, place: Place) -> None:
    path.unlink(missing_ok=True)
    if what == "folder":
        path.mkdir()
    elif what in ("link", "dangling"):
        path.symlink_to(place.folder / "beside" / ("file" if what == "link" else "nothing"))
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "unreadable":
        path.touch(0)


def _goes_on(run: Path, place: Place) -> None:
    """The new step has its row, once."""
    with (run / METRICS).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("step") == str(STEPS + 1) and row.get("train_loss")]
    place.expect(len(rows) == 1, f"metrics.csv has {len(rows)} rows of the new step")

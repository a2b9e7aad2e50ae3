"""What the measuring sections share: the clock, rows that may fail, and the program around the rows."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import math
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gpt2_fp8.engine.out_of_memory import is_out_of_memory
from gpt2_fp8.measure.memory_bound import wanted
from gpt2_fp8.measure.subprocesses import one_line
from gpt2_fp8.runtime.moments import Moment

Row = dict[str, Any]  # values are str, int, float or None, in the order of the columns

RUN_SECONDS = 0.03  # one timed run of calls on a GPU: long enough for its clock to settle
RUNS = {"cuda": 7, "cpu": 3}
UNFINISHED = "the program ended here: this row and those after it are missing"


class Unavailable(Exception):
    """Why a row has no figures although nothing is broken. `status`: "not installed", "refused" or "skipped"."""

    def __init__(self, status: str, message: str):
        super().__init__(message)
        self.status = status


def here() -> str:
    """Return the device that is measured: "cuda" if there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def seconds_of_each(calls: Iterable[Callable[[], object]], device: str) -> list[float]:
    """Measure the seconds of each of several calls in a row. On a GPU events measure, so that nothing waits."""
    on = torch.device(device)
    marks = [Moment(on)]
    for call in calls:
        call()
        marks.append(Moment(on))
    if device == "cuda":
        torch.cuda.synchronize()
    return [after.seconds_since(before) for before, after in itertools.pairwise(marks)]


def seconds_per_call(call: Callable[[], object], device: str) -> float:
    """Return the median over `RUNS` runs of the mean seconds of a call, after a warm-up.

    On a GPU a run is as many launches as fill `RUN_SECONDS`, queued without waiting. On a CPU it is one call.
    """

    def run(calls: int) -> float:
        return seconds_of_each([lambda: [call() for _ in range(calls)]], device)[0] / calls

    run(1)
    calls = math.ceil(RUN_SECONDS / max(run(3), 1e-6)) if device == "cuda" else 1
    return statistics.median(run(calls) for _ in range(RUNS[device]))


def measured(row: Mapping[str, Any], columns: Sequence[str], measure: Callable[[], Mapping[str, Any]]) -> Row:
    """Return `row` with "status", "message" and `columns`, filled by `measure`; its errors are put into the row."""
    found: Row = {**row, "status": "ok", "message": None, **dict.fromkeys(columns)}
    try:
        found.update(measure())
    except Unavailable as error:
        found.update(status=error.status, message=one_line(error))
    except Exception as error:  # another project's kernel may raise anything
        traceback.print_exc()
        if is_out_of_memory(error):
            found.update(status="out of memory", message=wanted(error))
        else:
            found.update(status="failed", message=one_line(f"{type(error).__name__}: {error}"))
    _free()
    return found


def installed(module: str) -> Any:
    """Import an optional module. Raises Unavailable if it is missing, and any other error of its import."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise Unavailable("not installed", f"{module} is not installed") from error
        raise  # it is installed, but something that it needs is not


def version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None if none is."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def program(rows: Callable[[Row], Iterable[Row]]) -> None:
    """Run `python -m ... OUT.json < request`: write the rows of a request; both are JSON.

    After each row, OUT.json holds the rows so far and one that marks the end. So nothing is lost if the next row ends
    the process.
    """
    request, out = json.load(sys.stdin), Path(sys.argv[1])
    found: list[Row] = []
    for row in rows(request):
        found.append(row)
        _write(out, [*found, {**dict.fromkeys(row), "status": "failed", "message": UNFINISHED}])
    _write(out, found)


def _write(out: Path, rows: list[Row]) -> None:
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(rows))
    os.replace(partial, out)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

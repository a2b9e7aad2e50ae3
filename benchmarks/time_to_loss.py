"""Which method reaches a loss first: tokens and seconds to it, from runs that finished their schedules.

    python benchmarks/fp8_gap.py STUDY --conditions rows.txt --seeds 1 2 3 4 -- data=fineweb ...
    python benchmarks/time_to_loss.py STUDY --speeds bf16=520000 muon=905000

A condition of the study is one method at one horizon, named `METHOD @ HORIZON`. The first method has one horizon: its
mean final validation loss is the loss to reach, L*. Of every other, two horizons bracket L*. For each seed the tokens N
to L* are interpolated between its two runs, linear in log tokens: nothing is read in the middle of a decay.

Seconds are N over the tokens a second of `--speeds`, which are measured side by side. Errors are standard errors: of N
over the seeds, with that of L* by the slope between the horizons.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from fp8_gap import folder_of
from words import Parser

Run = tuple[int, float]  # its tokens, and its final validation loss


class Reached(NamedTuple):
    """The tokens at which a method reaches the loss, their standard error, and how many seeds they are of."""

    tokens: float
    error: float
    seeds: int


def main(argv: list[str]) -> int:
    """Print the table of a study. Returns the exit code: 1 if a method has no answer."""
    parser = Parser(__doc__)
    parser.add_argument("study", type=Path, help="a folder of fp8_gap.py")
    parser.add_argument("--speeds", nargs="+", default=[], metavar="METHOD=TOKENS/S")
    asked, _ = parser.split(argv)
    if not (asked.study / "study.json").exists():
        parser.error(f"{asked.study} is no folder of fp8_gap.py")
    speeds = {name: float(speed) for name, _, speed in (given.rpartition("=") for given in asked.speeds)}
    methods = read(asked.study)
    first, *others = methods
    base, *more = methods[first].values()
    if more or not base:
        parser.error(f"{first}, whose loss is to be reached, needs finished runs of one horizon")
    losses = [loss for _, loss in base.values()]
    goal, error = fmean(losses), _standard_error(losses)
    reached: dict[str, Reached | str] = {first: Reached(fmean(tokens for tokens, _ in base.values()), 0.0, len(base))}
    reached |= {name: reach(methods[name], goal, error) for name in others}
    print(f"L* = {goal:.4f} ({error:.4f}), of {first}")
    print(table(reached, speeds))
    return 1 if any(isinstance(found, str) for found in reached.values()) else 0


def read(study: Path) -> dict[str, dict[str, dict[int, Run]]]:
    """Read {method: {horizon: {seed: run}}}, in the order of the study's conditions."""
    methods: dict[str, dict[str, dict[int, Run]]] = {}
    for name in json.loads((study / "study.json").read_text())["conditions"]:
        method, _, horizon = name.partition(" @ ")
        runs = methods.setdefault(method, {}).setdefault(horizon, {})
        for path in sorted(folder_of(study, name).glob("seed-*/summary.json")):
            found = json.loads(path.read_text())
            if found["status"] == "completed":
                runs[int(path.parent.name.removeprefix("seed-"))] = found["tokens"], found["last_val_loss"]
    return methods


def reach(horizons: dict[str, dict[int, Run]], goal: float, error: float) -> Reached | str:
    """Return when a method reaches `goal`, whose standard error is given; in words why its horizons do not tell."""
    if len(horizons) != 2:
        return f"two horizons bracket L*, and it has {len(horizons)}"
    one, other = horizons.values()
    pairs = [sorted((one[seed], other[seed])) for seed in one.keys() & other.keys()]
    if not pairs:
        return "no seed has finished at both of its horizons"
    if not fmean(short[1] for short, _ in pairs) >= goal >= fmean(long[1] for _, long in pairs):
        return "its two horizons do not bracket L*"
    crossings, slopes = [], []
    for (few, worse), (many, better) in pairs:
        slope = math.log(many / few) / (worse - better)  # of log tokens over the loss that they take away
        crossings.append(math.log(few) + slope * (worse - goal))
        slopes.append(slope)
    tokens = math.exp(fmean(crossings))
    return Reached(tokens, tokens * math.hypot(_standard_error(crossings), fmean(slopes) * error), len(pairs))


def table(reached: dict[str, Reached | str], speeds: dict[str, float]) -> str:
    """Describe each method, in Markdown. Ratios are to the first."""
    lines = ["| method | seeds | M tokens to L* | seconds | of the first's time |", "|---|---|---|---|---|"]
    first = next(iter(reached))
    base = reached[first]
    assert isinstance(base, Reached)
    for name, found in reached.items():
        if isinstance(found, str):
            lines.append(f"| {name} | | {found} | | |")
            continue
        cells = [name, str(found.seeds), f"{found.tokens / 1e6:.1f} ({found.error / 1e6:.1f})", "", ""]
        if name in speeds:
            seconds = found.tokens / speeds[name]
            cells[3] = f"{seconds:.1f}"
            if first in speeds:
                ratio = seconds / (base.tokens / speeds[first])
                cells[4] = f"{ratio:.3f} ({ratio * found.error / found.tokens:.3f})"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _standard_error(values: list[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

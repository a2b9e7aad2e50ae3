"""Runs compared: losses at equal tokens, time to equal loss, throughput, memory, and whether FP8 is as good as bf16.

python -m gpt2_fp8.compare outputs/my_sweep
python -m gpt2_fp8.compare runs=[outputs/a,outputs/b] --base bf16
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from datetime import datetime
from pathlib import Path

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import format_count
from gpt2_fp8.runtime import programs

_EXAMPLE = "python -m gpt2_fp8.compare outputs/RUN_NAME, or runs=[outputs/A,outputs/B]"


@programs.exit_code
def main(argv: list[str]) -> None:
    """Run the command line `argv` (without the program's name)."""
    asked = _parser().parse_args(argv)
    tops = [programs.path(name.strip()) for word in asked.words for name in _names(word) if name.strip()]
    problems = [] if tops else [Problem("no folder of runs is given", _EXAMPLE)]
    problems += [Problem(f"{top} is no folder (looked in {Path.cwd()})", _EXAMPLE) for top in tops if not top.is_dir()]
    if asked.out and asked.out.exists() and not asked.out.is_dir():
        problems.append(Problem(f"--out {asked.out} is a file", "name a folder, which may be new"))
    if asked.price is not None and not 0 < asked.price < math.inf:
        problems.append(Problem(f"--price {asked.price} is no price"))
    if problems:
        raise UserError(problems)
    from gpt2_fp8.checkpoint import durable
    from gpt2_fp8.reports import comparison, render, runs  # with numpy

    found, left_out = runs.read(tops)
    if len(found) < 2:
        why = f"{', '.join(map(str, tops))}: {format_count(len(found), 'run')} can be read, and it takes two"
        raise UserError.of("; ".join([why, *left_out[:3]]), "give a second run's folder, or that of a sweep")
    each = runs.conditions(found)
    base = runs.base_of(each) if asked.base is None else runs.find_condition(asked.base, each)
    compared = comparison.compare(each, base, asked.price)
    figures = comparison.figures(compared, left_out)
    new = Path("outputs") / f"compare-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder = asked.out or (tops[0] if len(tops) == 1 else new)
    shown = render.write(folder, compared, figures, 100 if sys.stdout.isatty() else None)
    written = ", ".join(name for name in render.FILES if (folder / name).exists())
    print(json.dumps(durable.replace_nonfinite(figures), indent=2) if asked.json else f"{shown}\n{folder}: {written}")


def _names(word: str) -> list[str]:
    return word.removeprefix("runs=").strip("[]").split(",") if word.startswith("runs=") else [word]


def _parser() -> argparse.ArgumentParser:
    parser = programs.parser(
        "compare",
        "Compares the runs of sweeps, and single runs: losses at equal tokens, time to equal loss, throughput, memory, "
        "and a verdict on FP8. Writes compare.md, compare.html and compare.png.",
    )
    parser.add_argument("words", nargs="*", metavar="FOLDER", help="folders of sweeps or runs, or runs=[A,B]")
    parser.add_argument("--base", metavar="NAME", help="the condition that others are compared with (default: bf16)")
    parser.add_argument("--price", type=float, metavar="PRICE", help="of a GPU for an hour, for the cost of equal loss")
    parser.add_argument(
        "--out", type=programs.path, metavar="FOLDER", help="where files go (default: the sweep's own folder)"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("compare", main))

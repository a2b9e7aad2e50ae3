"""Runs compared: losses at equal tokens, time to equal loss, throughput, memory, and whether FP8 is as good as bf16.

    python -m gpt2_fp8.compare outputs/my_sweep
    python -m gpt2_fp8.compare runs=[outputs/a,outputs/b] --base bf16

Exit codes: 0 done, 1 the files could not be written, 2 the input, 130 stopped by SIGINT.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.runtime import programs

if TYPE_CHECKING:
    from gpt2_fp8.reports.comparison import Comparison, Row
    from gpt2_fp8.reports.render import Section
    from gpt2_fp8.reports.runs import Condition

_EXAMPLE = "python -m gpt2_fp8.compare outputs/RUN_NAME, or runs=[outputs/A,outputs/B]"
FILES = ("compare.md", "compare.html", "compare.png")
_TITLE = "Comparison of runs"
_SECTIONS = {  # by key: the title, and what is said of the figures
    "runs": ("Runs", "Compared with {base}, up to the {tokens:,.0f} tokens that all have."),
    "verdict": ("Verdict on FP8", "By the confidence interval of the difference in loss."),
    "losses": ("Losses", "Nats a token. The interval is Welch's, at 95 %; pairs are of equal seeds. A training loss is "
               "the mean of the last {width:,.0f} tokens."),
    "equal_loss": ("Time to equal loss", "When the mean curves of a condition and of the base first came down to the "
                   "higher of their two losses at the end. Errors are standard errors over seeds (jackknife)."),
    "throughput": ("Throughput and memory", "Medians of a run's logged intervals, then means of the runs. Memory: the "
                   "peak."),
}  # fmt: skip
_FORMS = {key: form for form, keys in {
    ".4f": ("mean", "deviation", "level", "paired_error"), "+.4f": ("above_base", "paired"),
    "+.2%": ("relative", "relative_low", "relative_high"), ".0%": ("memory_of_base",), ".2f": ("times_base",),
    ",.0f": ("tokens", "base_tokens", "tokens_per_second"), ",.1f": ("seconds", "base_seconds", "memory_gb"),
    ".3f": ("tokens_ratio", "tokens_error", "seconds_ratio", "seconds_error"),
}.items() for key in keys}  # fmt: skip


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    return programs.exit_code(lambda: _compare(argv))


def _compare(argv: list[str]) -> None:
    asked = _parser().parse_args(argv)
    tops = [Path(name.strip()) for word in asked.words for name in _names(word) if name.strip()]
    problems = [] if tops else [Problem("no folder of runs is given", _EXAMPLE)]
    problems += [Problem(f"{top} is no folder (looked in {Path.cwd()})", _EXAMPLE) for top in tops if not top.is_dir()]
    if asked.out and asked.out.exists() and not asked.out.is_dir():
        problems.append(Problem(f"--out {asked.out} is a file", "name a folder, which may be new"))
    if problems:
        raise UserError(problems)
    from gpt2_fp8.reports import comparison, runs  # with numpy

    found, left_out = runs.read(tops)
    if len(found) < 2:
        why = f"{', '.join(map(str, tops))}: {len(found)} runs can be read, and it takes two"
        raise UserError.of("; ".join([why, *left_out[:3]]), "give a second run's folder, or that of a sweep")
    each = runs.conditions(found)
    compared = comparison.compare(each, runs.base_of(each) if asked.base is None else _named(asked.base, each))
    new = Path("outputs") / f"compare-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder = asked.out or (tops[0] if len(tops) == 1 else new)
    shown = write(folder, compared, left_out)
    written = ", ".join(name for name in FILES if (folder / name).exists())
    print(json.dumps(plain(compared, left_out), indent=2) if asked.json else f"{shown}\n{folder}: {written}")


def _names(word: str) -> list[str]:
    return word.removeprefix("runs=").strip("[]").split(",") if word.startswith("runs=") else [word]


def _named(name: str, each: Sequence[Condition]) -> Condition:
    """Return the condition of this name, or the only one whose name begins with it. Raises UserError."""
    for found in ([one for one in each if one.name == name], [one for one in each if one.name.startswith(name)]):
        if len(found) == 1:
            return found[0]
    raise UserError.of(f"--base {name} is none of the conditions", f"one of {[one.name for one in each[:10]]}")


def plain(found: Comparison, left_out: Sequence[str]) -> dict[str, Any]:
    """Return the comparison as plain values for JSON."""
    from gpt2_fp8.reports import comparison

    sides = found.sides
    return {
        "tokens": found.tokens,
        "runs": [comparison.describe_runs(side) for side in sides],
        "verdict": [comparison.verdict(side, found) for side in sides[1:] if side.condition.fp8],
        "losses": [row for side in sides for row in comparison.losses(side, found)],
        "equal_loss": [row for side in sides for row in comparison.equal_loss(side, found)],
        "throughput": [comparison.throughput(side, found) for side in sides],
        "notes": [*comparison.notes(found), *(f"Left out: {line}" for line in left_out)],
    }


def write(folder: Path, found: Comparison, left_out: Sequence[str]) -> str:
    """Write the files into `folder`, and return the Markdown. Raises OSError."""
    from gpt2_fp8.reports import render

    folder.mkdir(parents=True, exist_ok=True)
    sections, picture = _sections(plain(found, left_out), found), render.comparison(found)
    written = render.markdown(_TITLE, sections, FILES[2] if picture else None)
    page = render.page(_TITLE, render.markdown(_TITLE, sections, None), picture)
    durable.write_text(folder / FILES[0], written)
    durable.write_text(folder / FILES[1], page)
    if picture is not None:
        (folder / FILES[2]).write_bytes(picture)
    return written


def _sections(told: dict[str, Any], found: Comparison) -> list[Section]:
    from gpt2_fp8.reports.render import Section

    of = {"base": found.base.condition.name, "tokens": found.tokens, "width": found.width}
    shown = [(title, said.format(**of), told[key]) for key, (title, said) in _SECTIONS.items() if told[key]]
    sections = [Section(title, [said], _format(rows)) for title, said, rows in shown]
    return [*sections, Section("Notes", told["notes"])] if told["notes"] else sections


def _format(rows: Sequence[Row]) -> list[dict[str, str]]:
    return [
        {key.replace("_", " "): "" if cell is None else format(cell, _FORMS.get(key, "")) for key, cell in row.items()}
        for row in rows
    ]


def _parser() -> argparse.ArgumentParser:
    parser = programs.parser(
        "compare",
        "Compares the runs of sweeps, and single runs: losses at equal tokens, time to equal loss, throughput, memory, "
        "and a verdict on FP8. Writes compare.md, compare.html and compare.png.",
    )
    parser.add_argument("words", nargs="*", metavar="FOLDER", help="folders of sweeps or runs, or runs=[A,B]")
    parser.add_argument("--base", metavar="NAME", help="the condition that others are compared with (default: bf16)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where files go (default: the sweep's own folder)")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("compare", main))

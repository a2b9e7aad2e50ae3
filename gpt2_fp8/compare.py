"""Runs compared: losses at equal tokens and at equal time, speed, memory, and whether FP8 can be trusted.

    python -m gpt2_fp8.compare outputs/my_sweep
    python -m gpt2_fp8.compare runs=[outputs/a,outputs/b] --base bf16

Runs that differ only in their seed are repetitions. Exit codes: 0 done, 1 the files could not be written, 2 the input,
130 stopped by SIGINT.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import line
from gpt2_fp8.reports import compare_conditions, compare_record, comparison_notes, conditions, find_runs, verdict
from gpt2_fp8.reports.conditions import Condition
from gpt2_fp8.reports.find_runs import Found
from gpt2_fp8.runtime import programs

_QUIET_SECONDS = 2.0  # of reading, before it is announced, and between two lines after that
_EXAMPLE = "python -m gpt2_fp8.compare outputs/RUN_NAME, or runs=[outputs/A,outputs/B]"
_ANOTHER = "give a second run's folder too, or a sweep's: python -m gpt2_fp8.run -m seed=1,2 precision=bf16,fp8_hybrid"


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    return programs.exit_code(lambda: _compare(argv))


def _compare(argv: list[str]) -> None:
    asked = _parser().parse_args(argv)
    folders, problems = _folders(asked.words)
    problems += _problems(folders)
    out = asked.out.expanduser() if asked.out else None
    if out is not None and os.path.lexists(out) and not out.is_dir():
        problems.append(Problem(f"--out {out} is a file", "name a folder, which may be new"))
    if problems:
        raise UserError(problems)
    found = _read(folders)
    each = conditions.of(found.runs)
    base = conditions.base_of(each) if asked.base is None else _named(asked.base, each)
    compared = compare_conditions.compare(each, base)
    verdicts, notes = verdict.judge(compared), comparison_notes.of(compared, found.left_out)
    shown, files = compare_record.write(out or _out(folders), compared, verdicts, notes)
    if asked.json:
        print(compare_record.json_text(compared, verdicts, notes))
    else:
        print(f"{shown}\n\n{line(files)}")


def _folders(words: Sequence[str]) -> tuple[list[Path], list[Problem]]:
    """Return the folders that are named, also as `runs=[A,B]`, and what is wrong with the words."""
    folders: list[Path] = []
    problems = [] if words else [Problem("no folder of runs is given", _EXAMPLE)]
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key == "runs":
            named = [name.strip() for name in value.removeprefix("[").removesuffix("]").split(",")]
            folders += [Path(name).expanduser() for name in named if name]
            if not any(named):
                problems.append(Problem(f"{word} names no folder", _EXAMPLE))
        elif equals and key.isidentifier() and not os.path.lexists(word):
            near = "did you mean runs=[A,B]?" if difflib.get_close_matches(key, ["runs", "run"]) else _EXAMPLE
            problems.append(Problem(f"there is no key {key}", near))
        else:
            folders.append(Path(word).expanduser())
    return folders, problems


def _problems(folders: Sequence[Path]) -> list[Problem]:
    return [problem for folder in folders for problem in _problem(folder)]


def _problem(folder: Path) -> Iterator[Problem]:
    if not os.path.isdir(folder):
        what = "is a file" if os.path.lexists(folder) else "does not exist"
        yield Problem(
            f"{folder} {what} (looked in {Path.cwd()})", "give the folder of a run or a sweep: outputs/RUN_NAME"
        )
    else:
        try:
            os.listdir(folder)
        except OSError as error:
            yield Problem(f"{folder} cannot be read: {error.strerror}", "make it readable (chmod u+rx)")


def _read(folders: Sequence[Path]) -> Found:
    """Read the runs. Raises UserError if there are not two of them."""
    said = time.monotonic()

    def progress(read: int, count: int) -> None:
        nonlocal said
        if time.monotonic() - said > _QUIET_SECONDS:
            said = time.monotonic()
            print(f"reading runs: {read:,} of {count:,}", file=sys.stderr, flush=True)

    found = find_runs.below(folders, progress)
    if len(found.runs) > 1:
        return found
    where = ", ".join(map(str, folders))
    why = "".join(f"; {reason}" for reason in found.left_out[:3])
    if found.runs:
        raise UserError.of(f"{where}: one run alone can be read, and a comparison needs two{why}", _ANOTHER)
    raise UserError.of(f"{where}: no run can be read there{why}", _ANOTHER)


def _named(name: str, each: Sequence[Condition]) -> Condition:
    """Return the condition of this name, or the only one whose name begins with it. Raises UserError."""
    names = [condition.name for condition in each]
    exact = [condition for condition in each if condition.name == name]
    found = exact or [condition for condition in each if condition.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.3) or names[:1]
    listed = ", ".join(f"'{known}'" for known in names[:10])
    raise UserError.of(
        f"--base {name}: there is {'more than one' if found else 'no'} such condition (there are {listed})",
        "--base " + shlex.quote(near[0]),
    )


def _out(folders: Sequence[Path]) -> Path:
    """Return the sweep's own folder, or a new one below outputs/ if there is not one sweep."""
    if len(folders) == 1 and not find_runs.is_run(folders[0]):
        return folders[0]
    return Path("outputs") / f"compare-{datetime.now():%Y-%m-%d_%H-%M-%S}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpt2_fp8.compare",
        description="Compares the runs of sweeps, and single runs: losses at equal tokens and at equal time, time to "
        "the same loss, speed, memory, samples, and a verdict on FP8. Writes compare.md, .json, .html and .png.",
        epilog="Exit codes: 0 done; 1 the files could not be written; 2 your input; 130 stopped.",
    )
    parser.add_argument("--version", action="version", version=programs.VERSION)
    parser.add_argument("words", nargs="*", metavar="FOLDER", help="folders of sweeps or runs, or runs=[A,B]")
    parser.add_argument("--base", metavar="NAME", help="the condition that others are compared with (default: bf16)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where files go (default: the sweep's own folder)")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("compare", main))

"""The table of a sweep, made again from what its jobs have left.

    python -m gpt2_fp8.table outputs/my_sweep

Exit codes: 0 done, 1 the files could not be written, 2 the input, 130 stopped by SIGINT.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import harmless
from gpt2_fp8.reports import sweep_jobs, sweep_record
from gpt2_fp8.reports.sweep_jobs import Job
from gpt2_fp8.runtime import programs

PROGRAM = "python -m gpt2_fp8.table"


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    return programs.exit_code(lambda: _show(argv))


def _show(argv: list[str]) -> None:
    typed = _parser().parse_args(argv).folders
    folders = [folder.expanduser() for folder in typed]
    found: dict[Path, list[Job]] = {}
    if problems := list(_problems(folders, found)):
        raise UserError(problems)
    for folder, jobs in found.items():
        for text in sweep_record.write(folder, jobs):
            print(harmless(text))


def _problems(folders: list[Path], found: dict[Path, list[Job]]) -> Iterator[Problem]:
    """Find what is wrong with the folders; the jobs of the others are added to `found`."""
    for folder in folders:
        if not os.path.isdir(folder):
            what = "is a file" if os.path.lexists(folder) else "does not exist"
            yield Problem(f"{folder} {what} (looked in {Path.cwd()})", "give a sweep's folder: outputs/RUN_NAME")
            continue
        try:
            jobs = sweep_jobs.read(folder)
        except OSError as error:
            yield Problem(f"{folder} cannot be read: {error.strerror}", "make it readable (chmod u+rx)")
            continue
        if jobs:
            found[folder] = jobs
        else:
            yield Problem(
                f"{folder} holds no job of a sweep", "give the folder of a sweep (-m), above its jobs' folders"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Shows the jobs of a sweep, best first, and writes sweep.csv, sweep.md and sweep.png.",
        epilog="Exit codes: 0 done; 1 the files could not be written; 2 your input; 130 stopped.",
    )
    parser.add_argument("--version", action="version", version=programs.VERSION)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="a sweep's folder: outputs/RUN_NAME")
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("table", main))

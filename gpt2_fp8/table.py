"""The table of a sweep, made again from what its jobs have left.

python -m gpt2_fp8.table outputs/my_sweep
"""

from __future__ import annotations

import argparse
import sys

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import harmless
from gpt2_fp8.runtime import programs


@programs.exit_code
def main(argv: list[str]) -> None:
    """Run the command line `argv` (without the program's name)."""
    folders = _parser().parse_args(argv).folders
    from gpt2_fp8.reports import sweep  # with numpy

    found = {folder: sweep.read(folder) if folder.is_dir() else [] for folder in folders}
    if not all(found.values()):
        told = [f"{folder} is no folder with jobs of a sweep" for folder, jobs in found.items() if not jobs]
        raise UserError(Problem(why, "give a sweep's folder: outputs/RUN_NAME") for why in told)
    for folder, jobs in found.items():
        for text in sweep.write(folder, jobs):
            print(harmless(text))


def _parser() -> argparse.ArgumentParser:
    shown = "Shows the jobs of a sweep, best first, and writes sweep.csv and sweep.md."
    parser = programs.parser("table", shown)
    parser.add_argument(
        "folders", type=programs.path, nargs="+", metavar="FOLDER", help="a sweep's folder: outputs/RUN_NAME"
    )
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("table", main))

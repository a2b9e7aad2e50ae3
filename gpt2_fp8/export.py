"""The export: a checkpoint's weights as a Hugging Face folder, for transformers and all that reads its folders.

    python -m gpt2_fp8.export outputs/first exported
    python -m gpt2_fp8.export outputs/first/checkpoints/step-00000300 exported

Exit codes: 0 done, 1 the folder could not be written, 2 the input, 130 stopped by SIGINT.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpt2_fp8.config import output_folder
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import line
from gpt2_fp8.runtime import programs
from gpt2_fp8.runtime.file_program import exit_code

EPILOG = (
    "The other way round, a run begins with a Hugging Face folder's weights: init_from=FOLDER (docs/huggingface.md)."
)


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    arguments = _parser().parse_args(argv)
    source, folder = arguments.source.expanduser(), arguments.folder.expanduser().resolve()
    tokenizer = not arguments.no_tokenizer
    return exit_code(lambda: _export(source, folder, tokenizer), folder, "name another folder")


def _export(source: Path, folder: Path, tokenizer: bool) -> None:
    if problems := list(_problems(source, folder)):
        raise UserError(problems)
    from gpt2_fp8.train.hf_export import export  # after the paths, since it loads torch

    print(line(export(source, folder, tokenizer)))


def _problems(source: Path, folder: Path) -> Iterator[Problem]:
    """Find what is wrong with the paths."""
    if not os.path.isdir(source):
        what = "is a file" if os.path.exists(source) else "does not exist"
        remedy = "give a run's folder, outputs/RUN, or a checkpoint's: outputs/RUN/checkpoints/step-NNNNNNNN"
        yield Problem(f"{source} {what} (looked in {Path.cwd()})", remedy)
    if wrong := output_folder.check(folder, "FOLDER"):
        yield from (finding.problem for finding in wrong)
    elif os.path.isdir(folder) and os.listdir(folder):
        yield Problem(f"{folder} is there already, and not empty", "name a folder that is not there yet")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpt2_fp8.export",
        description="Writes a checkpoint for transformers: weights, config.json, the tokenizer and a model card.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=programs.VERSION)
    parser.add_argument("source", type=Path, help="a run's folder (its last checkpoint), or a checkpoint's")
    parser.add_argument("folder", type=Path, help="the folder to write; it is not there yet, or empty")
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="write no tokenizer, such as one whose file is gone"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

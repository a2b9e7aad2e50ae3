"""The export: a checkpoint's weights as a Hugging Face folder, for transformers and all that reads its folders.

python -m gpt2_fp8.export outputs/first exported
python -m gpt2_fp8.export outputs/first/checkpoints/step-00000300 exported --license apache-2.0
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.programs import AVERAGED, Averaged, why_no_model
from gpt2_fp8.config.shown import line
from gpt2_fp8.runtime import programs

_SOURCE = "give a run's folder, outputs/RUN, or a checkpoint's: outputs/RUN/checkpoints/step-NNNNNNNN"


@programs.exit_code
def main(argv: list[str]) -> None:
    """Run the command line `argv` (without the program's name)."""
    asked = _parser().parse_args(argv)
    source, folder = asked.source, asked.folder.resolve()
    if problems := list(_problems(source, folder)):
        raise UserError(problems)
    from gpt2_fp8.train.huggingface import export  # after the paths, since it loads torch

    print(line(export(source, folder, not asked.no_tokenizer, asked.license, asked.weights)))


def _problems(source: Path, folder: Path) -> Iterator[Problem]:
    if why := why_no_model(source):
        yield Problem(f"{source}: {why}", _SOURCE)
    yield from disk.check_new_folder(folder, "FOLDER")


def _parser() -> argparse.ArgumentParser:
    parser = programs.parser(
        "export",
        "Writes a checkpoint for transformers: weights, config.json, the tokenizer and a model card.",
        epilog="The other way round, a run begins with a Hugging Face folder's weights: init_from=FOLDER.",
    )
    parser.add_argument("source", type=programs.path, help="a run's folder (its last checkpoint), or a checkpoint's")
    parser.add_argument("folder", type=programs.path, help="the folder to write; it is not there yet, or empty")
    parser.add_argument("--no-tokenizer", action="store_true", help="write no tokenizer, if its file is gone")
    parser.add_argument("--weights", choices=get_args(Averaged), default="auto", help=AVERAGED)
    parser.add_argument("--license", metavar="ID", help="for the model card, such as apache-2.0; none if left out")
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("export", main))

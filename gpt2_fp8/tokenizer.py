"""The training of a tokenizer: a byte-level BPE on a run's text, in one command.

python -m gpt2_fp8.tokenizer train mine --vocab-size 16384 data=text_files data.train_files=corpus
python -m gpt2_fp8.run data.tokenizer=mine data=text_files data.train_files=corpus
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gpt2_fp8 import compose
from gpt2_fp8.config import disk, tokenizer_file
from gpt2_fp8.config.data_schema import TextData, sources_of
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.own_words import RUN
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import format_override, line
from gpt2_fp8.runtime import programs, registry

_SMALLEST = 257  # each byte, and what ends a document


@programs.stoppable
@programs.exit_code
def main(argv: list[str]) -> None:
    """Run the command line `argv` (without the program's name)."""
    asked, words = _parser().parse_known_args(argv)
    configs, folder = compose.preflight(words), asked.folder.expanduser()
    if problems := list(_problems(configs, folder)):
        raise UserError(problems)
    logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("gpt2_fp8").setLevel(logging.INFO)
    from gpt2_fp8.data import tokenizer_training  # after what was typed is known to be right: it loads torch

    config = configs[0]
    registry.load(tuple(config.plugins), Path.cwd())
    text = tokenizer_training.TrainingText(config.data, asked.megabytes)
    dtype = tokenizer_training.train(text, asked.vocab_size, asked.end, folder)
    of_text = f"{text.size / 1e6:,.1f} MB of text, {text.counts.read:,} documents"
    print(line(f"{folder}: {asked.vocab_size:,} ids, stored as {dtype}; trained on {of_text}"))
    keys = [f"data.sources.{name}.tokenizer" if name else "data.tokenizer" for name, _ in sources_of(config.data)]
    print(line(f"next: {shlex.join([*RUN.split(), *words, *(format_override(key, str(folder)) for key in keys)])}"))


def _problems(configs: list[RunConfig], folder: Path) -> Iterator[Problem]:
    if len(configs) > 1:
        yield Problem("-m: a tokenizer is trained on one text")
    for name, source in sources_of(configs[0].data):
        if not isinstance(source, TextData):
            key = f"data.sources.{name}" if name else "data"
            yield Problem(f"{key}={source.name}: its files have token ids already, and no text")
    if find_spec("tokenizers") is None:
        yield Problem("the library tokenizers, which trains them, is not installed", tokenizer_file.INSTALL)
    if wrong := disk.check_folder(folder, "FOLDER"):
        yield from wrong
    elif os.path.isdir(folder) and os.listdir(folder):
        yield Problem(f"{folder} is there already, and not empty", "name a folder that is not there yet")


def _number(least: int, text: str) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) < tokenizer_file.MOST_IDS):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} on")
    return int(text)


def _folder(text: str) -> Path:
    if "=" in text:
        raise argparse.ArgumentTypeError(f"{text} is no folder, which comes before the words of a run")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = programs.parser(
        "tokenizer",
        "Trains a tokenizer, a byte-level BPE, on the training text of a run of the same words.",
        "1 the files could not be written; 4 the data source was lost; ",
        "docs/data.md says more.",
        usage="%(prog)s train FOLDER --vocab-size N [--end TOKEN] [--megabytes N] [words of a run]",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=["train"], help="what to do")
    parser.add_argument(
        "folder", type=_folder, help="for tokenizer.json and tokenizer_config.json; it is not there yet, or empty"
    )
    parser.add_argument(
        "--vocab-size", type=partial(_number, _SMALLEST), required=True, metavar="N", help="ids, the end's among them"
    )
    parser.add_argument(
        "--end", default="<|endoftext|>", metavar="TOKEN", help="what ends a document (default: <|endoftext|>)"
    )
    parser.add_argument(
        "--megabytes", type=partial(_number, 1), default=1000, metavar="N", help="of text, at most (default: 1000)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("tokenizer", main))

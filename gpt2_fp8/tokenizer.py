"""The training of a tokenizer: a byte-level BPE on a run's text, in one command.

python -m gpt2_fp8.tokenizer train --out mine --vocab-size 16384 data=text_files data.train_files=corpus
python -m gpt2_fp8.run data.tokenizer=mine data=text_files data.train_files=corpus
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from gpt2_fp8 import compose
from gpt2_fp8.config import disk, tokenizer_file
from gpt2_fp8.config.data_schema import TextData, source_key, sources_of
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.own_words import RUN
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import format_override, line
from gpt2_fp8.runtime import programs, registry

MOST_IDS = 1 << 20  # several times the largest vocabularies; the trainer asks for memory for all at once


@programs.stoppable
@programs.exit_code
def main(argv: list[str]) -> None:
    """Run the command line `argv` (without the program's name)."""
    asked, words = _parser().parse_known_args(argv)
    anywhere = compose.Purpose(restarted=True)  # also where a run has been: nothing is written there
    configs, folder = compose.preflight(words, anywhere), asked.out
    if problems := list(_problems(configs, folder, asked.vocab_size)):
        raise UserError(problems)
    logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("gpt2_fp8").setLevel(logging.INFO)
    from gpt2_fp8.data import tokenizer_training  # after what was typed is known to be right: it loads torch

    config = configs[0]
    registry.load(tuple(config.plugins), Path.cwd())
    text = tokenizer_training.TrainingText(config.data, asked.megabytes)
    dtype = tokenizer_training.train(text, asked.vocab_size, asked.end, folder)
    of_text = f"{text.size / 1e6:,.1f} MB of text, {text.documents:,} documents"
    print(line(f"{folder}: {asked.vocab_size:,} ids, stored as {dtype}; trained on {of_text}"))
    keys = [f"{source_key(name)}.tokenizer" for name, _ in sources_of(config.data)]
    print(line(f"next: {shlex.join([*RUN.split(), *words, *(format_override(key, str(folder)) for key in keys)])}"))


def _problems(configs: list[RunConfig], folder: Path, vocab_size: int) -> Iterator[Problem]:
    if len(configs) > 1:
        yield Problem("-m: a tokenizer is trained on one text")
    for name, source in sources_of(configs[0].data):
        if not isinstance(source, TextData):
            yield Problem(f"{source_key(name)}={source.name}: its files have token ids already, and no text")
    if vocab_size > MOST_IDS:
        yield Problem(f"--vocab-size {vocab_size}: {MOST_IDS:,} at most")
    if find_spec("tokenizers") is None:
        yield Problem("the library tokenizers, which trains them, is not installed", tokenizer_file.INSTALL)
    yield from disk.check_new_folder(folder, "--out")


def _parser() -> argparse.ArgumentParser:
    parser = programs.parser(
        "tokenizer",
        "Trains a tokenizer, a byte-level BPE, on the training text of a run of the same words.",
        "1 the files could not be written; 4 the data source was lost; ",
        "docs/data.md says more.",
        usage="%(prog)s train --out FOLDER --vocab-size N [--end TOKEN] [--megabytes N] [words of a run]",
        allow_abbrev=False,
    )
    add, number, path = parser.add_argument, programs.positive, programs.path
    add("action", choices=["train"])
    add("--out", type=path, required=True, metavar="FOLDER", help="for its two files; it is not there yet, or empty")
    add("--vocab-size", type=number, required=True, metavar="N", help="ids, 257 to 1,048,576")
    add("--end", default="<|endoftext|>", metavar="TOKEN", help="what ends a document (default: %(default)s)")
    add("--megabytes", type=number, default=1000, metavar="N", help="of text at most (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("tokenizer", main))

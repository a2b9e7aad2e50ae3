"""The import: a Hugging Face folder's weights as a checkpoint, for every program that takes one.

    python -m gpt2_fp8.import_hf Llama-3.2-1B imported
    python -m gpt2_fp8.import_hf gpt2-folder imported data.tokenizer=gpt2

A run may begin with the folder itself, by init_from=FOLDER.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpt2_fp8 import compose
from gpt2_fp8.config import disk, hf_config, tokenizer_file
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import format_override, line
from gpt2_fp8.runtime import programs


@programs.exit_code
def main(argv: list[str]) -> None:
    """Run the command line `argv` (without the program's name)."""
    asked = _parser().parse_args(argv)
    source, folder = asked.source.absolute(), asked.folder.absolute()
    if problems := list(_problems(source, folder)):
        raise UserError(problems)
    config = _config(source, asked.words)
    from gpt2_fp8.train.huggingface import import_weights  # after the settings, since it loads torch

    print(line(import_weights(source, folder, config)))


def _config(source: Path, words: list[str]) -> RunConfig:
    """Return the settings of a run of the folder's model: its keys, its own tokenizer if it has one, and `words`."""
    architecture, keys = hf_config.read_folder(source)
    own = {f"model.{key}": f"model.{key}={show(value)}" for key, value in keys.items()}
    if any((source / file).is_file() for file in tokenizer_file.FILES):
        own["data.tokenizer"] = format_override("data.tokenizer", str(source))
    elif keys["vocab_size"] == tokenizer_file.NAMES["gpt2"]:
        own["data.tokenizer"] = "data.tokenizer=gpt2"
    typed = {word.partition("=")[0] for word in words}
    if "data.tokenizer" not in {*own, *typed}:
        files = " and no ".join(tokenizer_file.FILES[:2])
        raise UserError.of(f"{source} has no {files}, so its tokenizer is not known", "add data.tokenizer=FOLDER")
    fixed = ["run_name=imported", "model=gpt2", f"model.name={architecture.model_type}"]
    fixed += [format_override("init_from", str(source)), *(word for key, word in own.items() if key not in typed)]
    try:
        (config,) = compose.preflight([*fixed, *words])
    except UserError:  # a width that FP8 cannot divide is no hindrance to a checkpoint
        if "precision" in typed:
            raise
        (config,) = compose.preflight([*fixed, "precision=bf16", *words])
    return config


def _problems(source: Path, folder: Path) -> Iterator[Problem]:
    if not hf_config.is_folder(source):
        what = f"has no {hf_config.CONFIG}" if os.path.isdir(source) else "is no folder"
        yield Problem(f"{source} {what}", "give a folder as save_pretrained of transformers writes it")
    if wrong := disk.check_folder(folder, "FOLDER"):
        yield from wrong
    elif os.path.lexists(folder):
        yield Problem(f"{folder} is there already", "name a folder that is not there yet")


def _parser() -> argparse.ArgumentParser:
    parser = programs.parser(
        "import_hf",
        "Writes a Hugging Face folder's weights as a checkpoint: for generate, evaluate, init_from.",
        epilog="The other way round: python -m gpt2_fp8.export (docs/huggingface.md).",
    )
    parser.add_argument(
        "source", type=programs.path, help="a folder of GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM"
    )
    parser.add_argument("folder", type=programs.path, help="the checkpoint to write; it is not there yet")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="as in a run, such as data.tokenizer=gpt2")
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("import_hf", main))

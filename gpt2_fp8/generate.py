"""Text from a trained model, token by token, with a cache of keys and values.

python -m gpt2_fp8.generate outputs/first prompt="To be"
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from typing import IO, TYPE_CHECKING

from gpt2_fp8.compose.commandline import Program, list_keys, read, values_of
from gpt2_fp8.config import parsing
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.programs import GenerateConfig, check_generate
from gpt2_fp8.config.shown import format_count, harmless
from gpt2_fp8.runtime import programs

if TYPE_CHECKING:
    from gpt2_fp8.train.generation import Generation

PROGRAM = Program("python -m gpt2_fp8.generate", GenerateConfig, flags=("help", "overrides"), folder="ckpt_path")
HELP = """\
Writes text with a trained model: what you give it to begin with, and what the model goes on with.

{keys}

prompt is taken as typed, and may be given several times. Without a prompt a text begins as a document does.

Examples:
  python -m gpt2_fp8.generate outputs/first prompt="To be, or not to be"
  python -m gpt2_fp8.generate outputs/first checkpoint=best prompt=import prompt=def temperature=0
  python -m gpt2_fp8.generate outputs/first prompts=beginnings.txt samples=4 out=texts.jsonl

docs/generate.md says more. Exit codes: 0 done; 1 out could not be written; 2 your input; 130, 141 stopped."""


@programs.exit_code
def main(argv: list[str]) -> None:
    """Run the command line `argv` (without the program's name)."""
    if programs.answer_questions(argv, lambda: HELP.format(keys=list_keys(GenerateConfig))):
        return
    config = _settings(argv)
    from gpt2_fp8.train.generation import Generation  # imports torch

    ready = Generation(config)
    dtype = str(ready.dtype).removeprefix("torch.")
    print(f"{ready.path}, {ready.weights} weights, {dtype} on the {ready.device}", file=sys.stderr)
    with programs.to_write(config.out).open("w", encoding="utf-8") if config.out else nullcontext() as file:
        _write(ready, len(ready.prompts) * config.samples, file)


def _settings(argv: list[str]) -> GenerateConfig:
    """Return the settings. A prompt is taken as it was typed: what stands in it is no syntax. Raises UserError."""
    prompts = [word.removeprefix("prompt=") for word in argv if word.startswith("prompt=")]
    line = read([word for word in argv if not word.startswith("prompt=")], PROGRAM)
    problems = list(line.problems)
    if any("\ud800" <= character <= "\udfff" for prompt in prompts for character in prompt):
        problems.append(Problem("prompt has bytes that are no UTF-8"))
        prompts = []
    given = values_of(line.overrides, problems) | {"prompt": prompts}
    config = parsing.build_with_defaults(GenerateConfig, given, vars(GenerateConfig()), problems)
    if problems := [*problems, *check_generate(config)]:
        raise UserError(problems)
    return config


def _write(ready: Generation, count: int, file: IO[str] | None) -> None:
    """Print each text, and write it to `file` too; a single one appears as it is drawn."""
    clean = harmless if sys.stdout.isatty() else str

    def say(text: str) -> None:
        print(clean(text), end="", flush=True)

    started, tokens, alone = time.perf_counter(), 0, count == 1
    if alone:
        say(ready.prompts[0])
    for number, text in enumerate(ready.write(say if alone else lambda _: None), 1):
        tokens += text.tokens
        break_before = "" if number == 1 else "\n"
        say("\n" if alone else f"{break_before}[{number} of {count}] {text.prompt}{text.text}\n")
        if file is not None:
            row = {**vars(text), "seed": ready.config.seed, "checkpoint": str(ready.path), "weights": ready.weights}
            print(json.dumps(row, ensure_ascii=False), file=file, flush=True)
        if text.ended == "not finite":
            print(f"text {number} ends early: the model's logits were not finite", file=sys.stderr)
    seconds = time.perf_counter() - started
    print(f"{format_count(count, 'text')}, {tokens:,} tokens in {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(programs.main("generate", main))

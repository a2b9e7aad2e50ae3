"""The command line of `generate`. A prompt is taken as it was typed: what stands in it is no syntax."""

from __future__ import annotations

from gpt2_fp8.compose import own_keys
from gpt2_fp8.compose.commandline import Program, overrides_of, read
from gpt2_fp8.config import generate_schema
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.generate_schema import GenerateConfig

PROGRAM = Program("python -m gpt2_fp8.generate", GenerateConfig, flags=("help", "overrides"))
_PROMPT = "prompt="


def preflight(argv: list[str]) -> GenerateConfig:
    """Return the settings of a command line (without the program's name). Raises UserError with every problem."""
    prompts = [word.removeprefix(_PROMPT) for word in argv if word.startswith(_PROMPT)]
    line, problems = read([word for word in argv if not word.startswith(_PROMPT)], PROGRAM)
    words, found = overrides_of(line.words)
    problems += found
    if any("\ud800" <= character <= "\udfff" for prompt in prompts for character in prompt):
        problems.append(Problem("prompt has bytes that are no UTF-8"))
        prompts = []
    given = own_keys.values(words, problems)
    config = own_keys.settings(GenerateConfig, given | {"prompt": prompts}, problems)
    problems += generate_schema.check(config)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return config

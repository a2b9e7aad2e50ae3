"""Every key of `generate`, its range and its value where it is not typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from gpt2_fp8.config import output_folder, text_file, tokenizer_file, trained_folder
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.ranges import Amount, Refusal, Seed, above_zero_to_one, at_least
from gpt2_fp8.config.trained_folder import Which

_FORM = 'a prompt on each line; a file named .jsonl has {"prompt": TEXT} on each'
_ALL = Refusal("must be at least 1", "choose 1 or more; {key}=null draws from all ids")
TopP = Annotated[float, above_zero_to_one("0.9")]
TopK = Annotated[int, at_least(1, said=_ALL)]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to write, and how. `--help` shows the text beside each type."""

    ckpt_path: Annotated[str | None, "a run's folder, or a checkpoint's"] = None
    checkpoint: Annotated[Which, "of a run: its last checkpoint, or the one of the lowest validation loss"] = "last"
    prompt: Annotated[list[str], "a beginning, taken as typed; type it again for several"] = field(default_factory=list)
    prompts: Annotated[str | None, "a file of beginnings: a line each, or .jsonl"] = None
    samples: Annotated[Annotated[int, at_least(1, 10**5, "texts")], "texts of each beginning"] = 1
    tokens: Annotated[
        Annotated[int, at_least(1, 10**6, "tokens")] | None, "tokens of each text at most; null: 200, or what fits"
    ] = None
    temperature: Annotated[Amount, "logits are divided by it; 0: always the likeliest token"] = 1.0
    top_k: Annotated[TopK | None, "draw from so many of the likeliest tokens; null: from all"] = 50
    top_p: Annotated[TopP, "of these, the fewest whose probabilities sum to it"] = 1.0
    seed: Annotated[Seed, "of what is drawn"] = 1337
    stop: Annotated[bool, "end a text where the model ends a document"] = True
    slide: Annotated[bool, "go on past the model's context, with its newest half"] = False
    batch_size: Annotated[Annotated[int, at_least(1, 10**4, "texts")], "texts that are computed together"] = 16
    precision: Annotated[Literal["auto", "fp32", "bf16"], "auto: bf16 on a GPU, fp32 on a CPU"] = "auto"
    device: Annotated[Literal["auto", "cpu", "gpu"], "auto: a GPU if there is one"] = "auto"
    tokenizer: Annotated[str | None, "another place of the tokenizer; null: that of the run"] = None
    out: Annotated[str | None, "a file for the texts, as JSON lines"] = None


def check(config: GenerateConfig) -> list[Problem]:
    """List what is wrong with settings whose types and ranges are right, as far as it is known without the model."""
    found = list(trained_folder.check(config.ckpt_path, config.checkpoint))
    if config.prompts is not None and config.prompt:
        found.append(Problem("prompt and prompts are two places for the beginnings", "leave one of them out"))
    found += _beginnings(config)
    found += _unread(config)
    if config.tokenizer is not None:
        found += _tokenizer(config.tokenizer)
    if config.out is not None:
        found += check_out(config.out, prompts=config.prompts)
    return found


def _unread(config: GenerateConfig) -> Iterator[Problem]:
    """Report keys that would do nothing beside `temperature=0`."""
    if config.temperature == 0:
        if config.samples > 1:
            cause = f"temperature=0, samples={config.samples}: the likeliest text is always the same"
            yield Problem(cause, "samples=1, or temperature=1")
        if config.top_p < 1:
            yield Problem(f"temperature=0, top_p={config.top_p}: nothing is drawn", "leave top_p out, or temperature=1")


def beginnings(config: GenerateConfig, problems: list[Problem]) -> list[str]:
    """Return the texts to begin with; one empty text if none is asked for. Adds what is wrong to `problems`."""
    if config.prompts is None:
        return config.prompt or [""]
    text = text_file.read("prompts", config.prompts, _FORM, problems)
    if Path(config.prompts).suffix != ".jsonl":
        return [line for line in text.splitlines() if line.strip()]
    found = []
    for number, line in text_file.json_lines(text):
        try:
            found.append(_prompt(json.loads(line)))
        except (ValueError, RecursionError) as error:
            problems.append(Problem(f"prompts={show(config.prompts)}, line {number}: {error}", _FORM))
    return found


def _prompt(row: object) -> str:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError('it has no text under "prompt"')
    prompt.encode()  # UnicodeEncodeError is a ValueError: half of a surrogate pair
    return prompt


def _beginnings(config: GenerateConfig) -> list[Problem]:
    problems: list[Problem] = []
    found = beginnings(config, problems)
    if config.prompt and "" in config.prompt:
        remedy = "leave it out: without one, a text begins as a document does"
        problems.append(Problem("prompt is empty", remedy))
    if config.prompts is not None and not found and not problems:
        problems.append(Problem(f"prompts={show(config.prompts)} holds no prompt", _FORM))
    return problems


def check_out(out: str, **read: str | None) -> list[Problem]:
    """List what is wrong with a file to write: its folder, or that it is a folder itself, or one that is `read`."""
    path = Path(out).expanduser()
    for key, other in read.items():
        if other is not None and path.absolute() == Path(other).expanduser().absolute():
            return [Problem(f"out={show(out)}: would replace the file of {key}", "name another file: out=FILE.jsonl")]
    if not out.strip() or "\0" in out or path.is_dir():
        return [Problem(f"out={show(out)}: {'is a folder' if out.strip() and path.is_dir() else 'no name of a file'}",
                        "name a file: out=FILE.jsonl")]  # fmt: skip
    found = [finding.problem for finding in output_folder.check(path.absolute().parent, "out")]
    return [Problem(problem.cause, "choose a file in a folder that can be written: out=FILE") for problem in found]


def _tokenizer(name: str) -> list[Problem]:
    try:
        tokenizer_file.number_of_ids(name)
    except UserError as error:
        return [as_own(problem) for problem in error.problems]
    return []


def as_own(problem: Problem) -> Problem:
    """Return a problem of a run's `data.tokenizer` in this program's words."""
    return Problem(*(text.replace("data.tokenizer", "tokenizer") for text in problem))

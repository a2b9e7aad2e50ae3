"""The keys of the programs `generate`, `evaluate` and `bench`, their ranges and defaults, and the files that they name.

`--help` shows the text beside each type. The defaults of `bench` are in `conf/bench.yaml`, for a GPU and for a CPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from gpt2_fp8.config import disk, paths, tokenizer_file
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.paths import Which
from gpt2_fp8.config.ranges import Amount, Count, Seed, Share, above_zero, at_least
from gpt2_fp8.config.schema import RunConfig

T = TypeVar("T")
Texts = Annotated[int, at_least(1, 10**5, "texts")]
TextTokens = Annotated[int, at_least(1, 10**6, "tokens")]
_LONGEST = 10**8  # seconds: three years, and within what a clock takes


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What `generate` writes, and how."""

    ckpt_path: Annotated[str | None, "a run's folder, or a checkpoint's"] = None
    checkpoint: Annotated[Which, "of a run: its last checkpoint, or the one of the lowest validation loss"] = "last"
    prompt: Annotated[list[str], "a beginning, taken as typed; type it again for several"] = field(default_factory=list)
    prompts: Annotated[str | None, "a file of beginnings: a line each, or .jsonl"] = None
    samples: Annotated[Texts, "texts of each beginning"] = 1
    tokens: Annotated[TextTokens | None, "tokens of each text at most; null: 200, or what fits"] = None
    temperature: Annotated[Amount, "logits are divided by it; 0: always the likeliest token"] = 1.0
    top_k: Annotated[Count | None, "draw from so many of the likeliest tokens; null: from all"] = 50
    top_p: Annotated[Share, "of these, the fewest whose probabilities sum to it"] = 1.0
    seed: Annotated[Seed, "of what is drawn"] = 1337
    stop: Annotated[bool, "end a text where the model ends a document"] = True
    slide: Annotated[bool, "go on past the model's context, with its newest half"] = False
    batch_size: Annotated[Annotated[int, at_least(1, 10**4, "texts")], "texts that are computed together"] = 16
    precision: Annotated[Literal["auto", "fp32", "bf16"], "auto: bf16 on a GPU, fp32 on a CPU"] = "auto"
    device: Annotated[Literal["auto", "cpu", "gpu"], "auto: a GPU if there is one"] = "auto"
    tokenizer: Annotated[str | None, "another place of the tokenizer; null: that of the run"] = None
    out: Annotated[str | None, "a file for the texts, as JSON lines"] = None


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The keys of `evaluate` itself."""

    ckpt_path: Annotated[str | None, "a run's folder, or a checkpoint's"] = None
    checkpoint: Annotated[Which, "of a run: its last checkpoint, or the one of the lowest validation loss"] = "last"
    ranking: Annotated[str | None, "also rank endings: a file of HellaSwag's form, JSON lines"] = None
    out: Annotated[str | None, "a file for the results, as JSON"] = None


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What `bench` measures: all combinations of the four lists, with a recipe only if the precision is FP8."""

    model: Annotated[list[str], "choices of the group model"]
    precision: Annotated[list[str], "fp32, bf16, fp8_hybrid, fp8_e4m3"]
    recipe: Annotated[list[str], "of the FP8 precisions: delayed, current, rowwise, block, mxfp8"]
    micro_batch_size: Annotated[list[Count], "sequences a forward pass"]
    # null: on a GPU as many micro-batches as come nearest to 131,072 tokens, at least one
    global_batch_size: Annotated[Count | None, "sequences a step; null: about 131,072 tokens, on a CPU one micro-batch"]
    # where it is not in the lists
    baseline: Annotated[bool, "on a GPU also bf16 under torch.compile, which the ratios refer to"]
    steps: Annotated[Count, "timed steps"]
    warmup: Annotated[int, at_least(0), "steps before them"]
    timeout: Annotated[float, above_zero(_LONGEST, "seconds"), "seconds that a case may take"]
    profile: Annotated[bool, "also the kernels that a step's time goes to"]
    # instead of the combinations of precision and recipe; the ratios are then to the first row and to the row before
    rows: Annotated[str | None, "a file of lines NAME: WORDS OF A RUN, measured in turn"] = None


@dataclass(frozen=True, kw_only=True)
class EvaluateRunConfig(RunConfig):
    """All that the command line of `evaluate` knows: a run's keys and its own."""

    evaluate: EvaluateConfig


@dataclass(frozen=True, kw_only=True)
class BenchRunConfig(RunConfig):
    """All that the command line of `bench` knows: a run's keys, which hold for every case, and its own."""

    bench: BenchConfig


# ---- checks, as far as they need no model ----------------------------------------------------------------------------


def check_generate(config: GenerateConfig) -> list[Problem]:
    """List what is wrong with settings whose types and ranges are right."""
    problems = list(paths.check_trained(config.ckpt_path, config.checkpoint))
    if config.prompts is not None and config.prompt:
        problems.append(Problem("prompt and prompts are two places for the beginnings"))
    before, found = len(problems), beginnings(config, problems)
    if "" in config.prompt:
        problems.append(Problem("prompt is empty: without one, a text begins as a document does"))
    if config.prompts is not None and not found and len(problems) == before:
        problems.append(Problem(f"prompts={show(config.prompts)} holds no prompt"))
    if config.temperature == 0 and config.samples > 1:
        problems.append(Problem(f"temperature=0, samples={config.samples}: the likeliest text is always the same"))
    if config.temperature == 0 and config.top_p < 1:
        problems.append(Problem(f"temperature=0, top_p={config.top_p}: nothing is drawn"))
    if config.tokenizer is not None:
        try:
            tokenizer_file.number_of_ids(config.tokenizer)
        except UserError as error:
            problems += error.problems
    return [*problems, *_check_out(config.out, prompts=config.prompts)]


def check_evaluate(own: EvaluateConfig) -> list[Problem]:
    """List what is wrong with the program's own keys."""
    problems = list(paths.check_trained(own.ckpt_path, own.checkpoint))
    if own.ranking is not None:
        read_ranking(own.ranking, problems)
    return [*problems, *_check_out(own.out, ranking=own.ranking)]


def _check_out(out: str | None, **read: str | None) -> Iterator[Problem]:
    """Find what is wrong with a file to write: its folder, or that it is a folder itself, or one that is `read`."""
    if out is None:
        return
    path = Path(out).expanduser()
    replaced = [key for key, file in read.items() if file and path.absolute() == Path(file).expanduser().absolute()]
    if replaced:
        yield Problem(f"out={show(out)}: would replace the file of {replaced[0]}")
    elif not out.strip() or not out.isprintable():
        yield Problem(f"out={show(out)}: no name of a file")
    elif path.is_dir():
        yield Problem(f"out={show(out)}: is a folder")
    else:
        yield from (finding.problem for finding in disk.check_folder(path.absolute().parent, "out"))


# ---- files -----------------------------------------------------------------------------------------------------------


def beginnings(config: GenerateConfig, problems: list[Problem]) -> list[str]:
    """Return the texts to begin with; one empty text if none is asked for. Adds what is wrong to `problems`."""
    if config.prompts is None:
        return config.prompt or [""]
    if Path(config.prompts).suffix == ".jsonl":
        return _read_lines("prompts", config.prompts, _prompt, problems)
    return [line for line in disk.read_text("prompts", config.prompts, problems).splitlines() if line.strip()]


def _read_lines(key: str, file: str, parse: Callable[[Any], T], problems: list[Problem]) -> list[T]:
    """Return what `parse` makes of each line of JSON. What is wrong is added to `problems`, by the line's number."""
    found = []
    for number, line in disk.json_lines(disk.read_text(key, file, problems)):
        try:
            found.append(parse(json.loads(line)))
        except (ValueError, RecursionError) as error:
            problems.append(Problem(f"{key}={show(file)}, line {number}: {error}"))
    return found


def _prompt(row: Any) -> str:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError('it has no text under "prompt"')
    prompt.encode()  # UnicodeEncodeError is a ValueError: half of a surrogate pair
    return prompt


class Item(NamedTuple):
    """A beginning, its endings without the blank in front of them, and the place of the right one."""

    context: str
    endings: tuple[str, ...]
    label: int


def read_ranking(file: str, problems: list[Problem]) -> list[Item]:
    """Return the items of a file of HellaSwag's form (Zellers et al. 2019). What is wrong is added to `problems`."""
    before, items = len(problems), _read_lines("ranking", file, _item, problems)
    if not items and len(problems) == before:
        problems.append(Problem(f"ranking={show(file)} holds no line"))
    return items


def _item(row: Any) -> Item:
    """Check a line, and prepare one of HellaSwag's own file. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    ours = all(isinstance(row.get(key), str) for key in ("activity_label", "ctx_a", "ctx_b"))
    context, endings, label = row.get("ctx"), row.get("endings"), row.get("label")
    if ours:
        context = _cleaned(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    if not isinstance(context, str):
        raise ValueError('it has no text under "ctx"')
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(e, str) and e.strip() for e in endings):
        raise ValueError('it has no list of two texts or more under "endings"')
    if isinstance(label, str) and label.isascii() and label.isdigit():  # as the hub's copy has it
        label = int(label)
    if type(label) is not int or not 0 <= label < len(endings):
        raise ValueError(f'its "label" is {show(str(label))}, and not from 0 to {len(endings) - 1}')
    if ours:
        endings = list(map(_cleaned, endings))
        if not all(endings):
            raise ValueError("an ending is only a note in brackets")
    for text in (context, *endings):
        text.encode()  # UnicodeEncodeError is a ValueError: half of a surrogate pair
    return Item(context, tuple(endings), label)


def _cleaned(text: str) -> str:
    """Prepare a text of HellaSwag's own file as lm-eval does: without what WikiHow's pages have in brackets."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

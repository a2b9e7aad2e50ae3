"""The keys of the programs `generate` and `evaluate`, their ranges and defaults, and the files that they name.

`--help` shows the text beside each type.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from gpt2_fp8.config import disk, hf_config, tokenizer_file
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import Amount, Count, Range, Seed, Share, problem, show

Which = Literal["last", "best"]
Averaged = Literal["auto", "ema", "raw"]
AVERAGED = "ema: their average (optim.ema_decay); raw: those of the checkpoint's step; auto: ema if there is one"
EXAMPLES = "ckpt_path=outputs/RUN, or a checkpoint's folder: ckpt_path=outputs/RUN/checkpoints/step-NNNNNNNN"
Texts = Annotated[int, Range(1, 10**5)]
TextTokens = Annotated[int, Range(1, 10**6)]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What `generate` writes, and how."""

    ckpt_path: Annotated[str | None, "a run's folder, or a checkpoint's; also typed without its key"] = None
    checkpoint: Annotated[Which, "of a run: its last checkpoint, or the one of the lowest validation loss"] = "last"
    weights: Annotated[Averaged, AVERAGED] = "auto"
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
    batch_size: Annotated[Annotated[int, Range(1, 10**4)], "texts that are computed together"] = 16
    precision: Annotated[Literal["auto", "fp32", "bf16"], "auto: bf16 on a GPU, fp32 on a CPU"] = "auto"
    device: Annotated[Literal["auto", "cpu", "gpu"], "auto: a GPU if there is one"] = "auto"
    tokenizer: Annotated[str | None, "another place of the tokenizer; null: that of the run"] = None
    out: Annotated[str | None, "a file for the texts, as JSON lines"] = None


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The keys of `evaluate` itself."""

    ckpt_path: Annotated[str | None, "a run's folder, or a checkpoint's; also typed without its key"] = None
    checkpoint: Annotated[Which, "of a run: its last checkpoint, or the one of the lowest validation loss"] = "last"
    weights: Annotated[Averaged, AVERAGED] = "auto"
    ranking: Annotated[str | None, "also rank endings: a file of HellaSwag's form, JSON lines"] = None
    out: Annotated[str | None, "a file for the results, as JSON"] = None


# ---- a trained model -------------------------------------------------------------------------------------------------


def is_run(path: Path) -> bool:
    """Return whether a folder is a run's, with checkpoints below it."""
    return os.path.isdir(path / "checkpoints")


def why_no_model(path: Path) -> str | None:
    """Return why a folder holds no trained model of this program, as part of a sentence; None if it may."""
    if not os.path.isdir(path):
        return f"{'is a file' if os.path.exists(path) else 'does not exist'} (looked in {Path.cwd()})"
    if is_run(path) or os.path.lexists(path / "manifest.json"):
        return None
    if hf_config.is_folder(path):
        return "it is a Hugging Face folder, and no checkpoint: python -m gpt2_fp8.import_hf makes one of it"
    return "it has neither checkpoints, as a run's folder, nor a manifest.json, as a checkpoint's"


def check_trained(ckpt_path: str | None, which: Which) -> Iterator[Problem]:
    """Find what is wrong with a program's `ckpt_path` and `checkpoint`, as far as the names of files tell."""
    if not ckpt_path:
        yield Problem("ckpt_path is missing: it names the model", EXAMPLES)
        return
    path, said = Path(ckpt_path.replace("\0", "\ufffd")).expanduser(), f"ckpt_path={show(ckpt_path)}"
    if why := why_no_model(path):
        yield Problem(f"{said}: {why}", EXAMPLES)
    elif which == "best" and not is_run(path):
        yield Problem(f"checkpoint=best chooses among a run's checkpoints, and {said} is one")


# ---- checks, as far as they need no model ----------------------------------------------------------------------------


def check_generate(config: GenerateConfig) -> list[Problem]:
    """List what is wrong with settings whose types and ranges are right."""
    problems = list(check_trained(config.ckpt_path, config.checkpoint))
    beginnings(config, problems)
    if config.prompts is not None and config.prompt:
        problems.append(Problem("prompt and prompts are two places for the beginnings"))
    if "" in config.prompt:
        problems.append(Problem("prompt is empty: without one, a text begins as a document does"))
    if config.temperature == 0 and (config.samples > 1 or config.top_p < 1):
        reason = "nothing is drawn, and the likeliest text is always the same"
        problems.append(problem(config, "temperature samples top_p", reason))
    if config.tokenizer is not None:
        try:
            tokenizer_file.number_of_ids(config.tokenizer)
        except UserError as error:
            problems += error.problems
    return [*problems, *_check_out(config.out, prompts=config.prompts)]


def check_evaluate(own: EvaluateConfig) -> list[Problem]:
    """List what is wrong with the program's own keys."""
    problems = list(check_trained(own.ckpt_path, own.checkpoint))
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
    elif not out.strip() or path.is_dir():
        yield Problem(f"out={show(out)}: no name of a file")
    else:
        yield from disk.check_folder(path.absolute().parent, "out")


# ---- files -----------------------------------------------------------------------------------------------------------


def beginnings(config: GenerateConfig, problems: list[Problem]) -> list[str]:
    """Return the texts to begin with; one empty text if none is asked for. Adds what is wrong to `problems`."""
    if config.prompts is None:
        return config.prompt or [""]
    parse = _prompt if Path(config.prompts).suffix == ".jsonl" else str
    return disk.read_lines("prompts", config.prompts, parse, problems)


def _prompt(line: str) -> str:
    row = json.loads(line)
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


def read_ranking(file: str, problems: list[Problem], key: str = "ranking") -> list[Item]:
    """Return the items of a file of HellaSwag's form (Zellers et al. 2019), which `key` names.

    What is wrong is added to `problems`.
    """
    return disk.read_lines(key, file, _item, problems)


def _item(line: str) -> Item:
    """Check a line, and prepare one of HellaSwag's own file. Raises ValueError."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    context, endings, label = row.get("ctx"), row.get("endings"), row.get("label")
    if not isinstance(context, str):
        raise ValueError('it has no text under "ctx"')
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(e, str) for e in endings):
        raise ValueError('it has no list of two texts or more under "endings"')
    if all(isinstance(row.get(key), str) for key in ("activity_label", "ctx_a", "ctx_b")):
        context = _clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
        endings = list(map(_clean, endings))
    if not all(ending.strip() for ending in endings):
        raise ValueError("an ending is empty")
    if isinstance(label, str) and label.isascii() and label.isdigit():  # as the hub's copy has it
        label = int(label)
    if type(label) is not int or not 0 <= label < len(endings):
        raise ValueError(f'its "label" is {show(str(label))}, and not from 0 to {len(endings) - 1}')
    "".join((context, *endings)).encode()  # UnicodeEncodeError is a ValueError: half of a surrogate pair
    return Item(context, tuple(endings), label)


def _clean(text: str) -> str:
    """Prepare a text of HellaSwag's own file as lm-eval does: without what WikiHow's pages have in brackets."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

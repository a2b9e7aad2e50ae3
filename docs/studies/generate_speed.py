"""Tokens a second of `generate`, and of transformers' `generate` on the same weights, prompts and machine.

    python docs/studies/generate_speed.py model=gpt2 rows=1
    python docs/studies/generate_speed.py model=llama3_small rows=8 tokens=64 device=gpu precision=bf16

The weights are random, so that nothing is downloaded. Both write the likeliest tokens, in turn; what is printed is the
median, and the slowest and the fastest time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

import program
import torch
import transformers

from gpt2_fp8 import load_config
from gpt2_fp8.checkpoint import files
from gpt2_fp8.compose import own_keys
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.generate_schema import GenerateConfig
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.decoder import Decoder
from gpt2_fp8.model.gpt2 import GPT2, initialise
from gpt2_fp8.model.sampling import Sampling
from gpt2_fp8.model.texts import Text, go_on
from gpt2_fp8.train import hf_export, saved_config
from gpt2_fp8.train.generation import Generation

DEFAULTS = {
    "model": "gpt2", "rows": "1", "prompt": "32", "tokens": "64", "times": "5", "device": "auto", "precision": "auto",
}  # fmt: skip
NUMBERS = ("rows", "prompt", "tokens", "times")


def main(argv: list[str]) -> int:
    """Measure what `key=value` words ask for. Returns the exit code."""
    try:
        measure(read(argv))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def read(argv: list[str]) -> dict[str, str]:
    """Return the value of each key. Raises UserError with every word that gives none."""
    given = [word.partition("=") for word in argv]
    problems = [
        Problem(f"{key}: there is no such key here", f"{(get_close_matches(key, DEFAULTS, 1) or ['model'])[0]}=VALUE")
        for key, _, _ in given
        if key not in DEFAULTS
    ]
    problems += [
        Problem(f"{key}={value}: it is a number from 1 on", f"{key}={DEFAULTS[key]}")
        for key, _, value in given
        if key in NUMBERS and not (value.isascii() and value.isdecimal() and int(value))
    ]
    asked = DEFAULTS | {key: value for key, _, value in given}
    own_keys.settings(GenerateConfig, {key: asked[key] for key in ("device", "precision")}, {}, problems)
    if problems:
        raise UserError(problems)
    return asked


def measure(asked: dict[str, str]) -> None:
    """Print the figures of both programs. Raises UserError for a model or a device that is not there."""
    rows, length, tokens, times = (int(asked[key]) for key in NUMBERS)
    config = load_config(f"model={asked['model']}")  # on bytes: neither program needs a vocabulary
    if length + tokens > (most := config.model.n_positions):
        fits = f"tokens={most - length}" if length < most else f"prompt={most // 2} tokens={most // 2}"
        raise UserError.of(f"prompt={length}, tokens={tokens}: {asked['model']} has a context of {most}", fits)
    with tempfile.TemporaryDirectory() as folder:
        ready, theirs = both(Path(folder), config, asked)
    ids = torch.randint(0, ready.model.vocab_size - 1, (rows, length), generator=torch.Generator().manual_seed(0))
    prompts, on_device = ids.tolist(), ids.to(ready.device)

    def ours() -> None:
        texts = [Text(prompt, seed=0, most=tokens) for prompt in prompts]
        decoder = Decoder(ready.model, rows, length + tokens)
        for _ in go_on(decoder, texts, Sampling(temperature=0.0), ready.model.vocab_size, end=None):
            pass
        assert all(len(text.ids) == tokens for text in texts)

    def transformers_() -> None:
        found = theirs.generate(
            on_device, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        assert found.shape == (rows, length + tokens)

    print(f"{asked['model']}, {rows} rows, {length} + {tokens} tokens, {ready.dtype} on {ready.device}")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{torch.get_num_threads()} threads, {versions}")
    programs: dict[str, Callable[[], None]] = {"generate": ours, "transformers": transformers_}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for attempt in range(times + 1):
        for name, write in programs.items():
            started = time.perf_counter()
            write()  # ends with ids on the host, so nothing is left to do on a GPU
            if attempt:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    for name, found in seconds.items():
        rate = rows * tokens / statistics.median(found)
        print(f"{name:<13} {rate:8.1f} tokens/s  ({min(found):.3f} to {max(found):.3f} s)")
    ratio = statistics.median(seconds["transformers"]) / statistics.median(seconds["generate"])
    print(f"ratio         {ratio:8.2f}")


def both(folder: Path, config: RunConfig, asked: dict[str, str]) -> tuple[Generation, transformers.PreTrainedModel]:
    """Write a checkpoint of random weights and its export, and load each by its own program."""
    model = GPT2(config.model, vocabulary(config), Composed(reference, recompute="none"))
    initialise(model, seed=1)
    plain = saved_config.to_plain(config, vocabulary(config))
    files.write(folder / "own", {"state_dict": model.state_dict(), saved_config.KEY: plain, "global_step": 0})
    hf_export.export(folder / "own", folder / "exported")
    ready = Generation(
        GenerateConfig(ckpt_path=str(folder / "own"), device=asked["device"], precision=asked["precision"])  # type: ignore[arg-type]
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=ready.dtype)
    return ready, theirs.to(ready.device).eval()


if __name__ == "__main__":
    program.run(main)

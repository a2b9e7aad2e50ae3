"""The learning rate of a run, step by step, before it is started: a table and a picture.

python -m gpt2_fp8.schedule model=gpt2 data=fineweb optim.lr=3e-3 optim.warmup_steps=200 trainer.max_steps=1760
python -m gpt2_fp8.schedule -m model=gpt2 optim.schedule=cosine,linear
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpt2_fp8 import compose
from gpt2_fp8.config import own_words
from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import format_large, harmless, line
from gpt2_fp8.runtime import programs

_TENTHS = 10
_POINTS = 1000  # of a curve
DEFAULT = Path("outputs/schedule.png")


@programs.exit_code
def main(argv: list[str]) -> None:
    """Run the command line `argv` (without the program's name)."""
    own, words = _parser().parse_known_args(argv)
    configs = compose.preflight(words, compose.Purpose(restarted=True))  # also where a run has been
    from gpt2_fp8.train.setup import resolve_length  # after what was typed is known to be right: it loads torch

    runs = [resolve_length(config, own_words.keys(words)).config for config in configs]
    for config in runs:
        print(harmless("\n".join(lines(config))), end="\n\n")
    try:
        own.picture.parent.mkdir(parents=True, exist_ok=True)
        plot(runs, own.picture)
        print(line(f"picture: {own.picture}"))
    except ImportError:
        print('no picture, since matplotlib is not installed: pip install -e ".[bench]"')


def lines(config: RunConfig) -> Iterator[str]:
    """Describe the schedule of a run whose `trainer.max_steps` is known: what it is, and a table."""
    from gpt2_fp8.engine.optim import learning_rate_factor

    optim, steps, tokens = config.optim, config.trainer.max_steps or 0, tokens_a_step(config)
    yield f"{config.model.name}: {steps:,} steps of {tokens:,} tokens, {steps * tokens:,} tokens in all"
    last = learning_rate_factor(steps - 1, optim, steps)
    yield f"{optim.schedule}: peak {optim.lr:.3g} after {optim.warmup_steps:,} steps, {optim.lr * last:.3g} at the end"
    yield f"{'step':>11}  {'tokens':>8}  {'rate':>9}  {'of the peak':>11}  phase"
    begins = phases(config)
    for step in sorted({steps, *begins, *(round(steps * part / _TENTHS) or 1 for part in range(1, _TENTHS))}):
        part = learning_rate_factor(step - 1, optim, steps)
        phase = begins[max(first for first in begins if first <= step)]
        yield (
            f"{step:11,}  {format_large(step * tokens):>8}  {optim.lr * part:9.2e}  {100 * part:9.1f} %  "
            f"{phase}{' begins' if step in begins else ''}"
        )


def phases(config: RunConfig) -> dict[int, str]:
    """Return the names of the schedule's phases by their first steps, which count from 1."""
    optim, steps = config.optim, config.trainer.max_steps or 0
    found = {1: "warm-up"} if optim.warmup_steps else {}
    if optim.warmup_steps < steps:
        found[optim.warmup_steps + 1] = "stable" if optim.decay_steps is not None else optim.schedule
    if optim.decay_steps is not None:
        found[steps - optim.decay_steps + 1] = "decay"
    return found


def plot(configs: Sequence[RunConfig], path: Path) -> None:
    """Write a PNG with each run's rate over its tokens, and the phases of a single one.

    Raises ImportError without matplotlib, and OSError.
    """
    from matplotlib.figure import Figure  # no pyplot: no display, and no state that stays

    from gpt2_fp8.engine.optim import learning_rate_factor

    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for config in configs:
        optim, steps, tokens = config.optim, config.trainer.max_steps or 0, tokens_a_step(config)
        begins = phases(config)
        every = sorted({*range(0, steps, max(1, steps // _POINTS)), *(step - 1 for step in begins), steps - 1})
        rates = [optim.lr * learning_rate_factor(step, optim, steps) for step in every]
        label = f"{config.model.name}, {optim.schedule}, peak {optim.lr:.3g}, warm-up {optim.warmup_steps:,}, "
        label = line(f"{label}{steps:,} steps", 100).replace("$", r"\$")
        (curve,) = axes.plot([(step + 1) * tokens for step in every], rates, label=label)
        for step, phase in begins.items():
            if step > 1:
                axes.axvline(step * tokens, color=curve.get_color(), linestyle=":", linewidth=1)
            if len(configs) == 1:
                where = step * tokens, 0
                axes.annotate(phase, where, (4, 4), textcoords="offset points", rotation=90, fontsize=8)
        axes.plot(steps * tokens, rates[-1], "o", color=curve.get_color(), markersize=4)
    axes.set(xlabel="tokens", ylabel="learning rate")
    axes.xaxis.set_major_formatter(lambda tokens, _: format_large(tokens))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper left", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, format="png")


def _parser() -> argparse.ArgumentParser:
    parser = programs.parser(
        "schedule",
        "Shows the learning rate of each step of the run that the same words would start.",
        "1 the picture could not be written; 4 the text could not be counted; ",
        usage="%(prog)s [--picture FILE] [words of a run]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--picture", type=programs.path, default=DEFAULT, metavar="FILE", help=f"a PNG; {DEFAULT} if left out"
    )
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("schedule", main))

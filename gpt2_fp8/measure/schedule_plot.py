"""The picture of learning rates: one curve a run, over its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import line
from gpt2_fp8.engine.schedule import learning_rate_factor

_POINTS = 1000  # a curve


def plot(configs: Sequence[RunConfig], path: Path) -> None:
    """Write a PNG with the rate of every step of each run; a dotted line marks the end of a warm-up.

    Each run's `trainer.max_steps` is known. Raises ImportError if matplotlib is not installed, and OSError.
    """
    from matplotlib.figure import Figure  # no pyplot: no display, and no state that stays

    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for config in configs:
        steps, tokens = config.trainer.max_steps or 0, tokens_a_step(config)
        every = sorted(
            {*range(0, steps, max(1, steps // _POINTS)), min(config.optim.warmup_steps, steps - 1), steps - 1}
        )
        rates = [config.optim.lr * learning_rate_factor(step, config.optim, steps) for step in every]
        (curve,) = axes.plot([(step + 1) * tokens for step in every], rates, label=_label(config))
        if 0 < config.optim.warmup_steps < steps:
            axes.axvline((config.optim.warmup_steps + 1) * tokens, color=curve.get_color(), linestyle=":", linewidth=1)
        axes.plot(steps * tokens, rates[-1], "o", color=curve.get_color(), markersize=4)
    axes.set_xlabel("tokens")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, format="png")


def _label(config: RunConfig) -> str:
    optim = config.optim
    words = f"{config.model.name}, {optim.schedule}, peak {optim.lr:.3g}, warm-up {optim.warmup_steps:,}"
    return line(f"{words}, {config.trainer.max_steps:,} steps", 100).replace("$", r"\$")

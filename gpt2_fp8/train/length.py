"""The number of steps of a run: what its limits come to on its text. The log says which of them holds."""

from __future__ import annotations

import logging
import os
from collections.abc import Container
from dataclasses import replace
from typing import NamedTuple

from gpt2_fp8.config import run_length
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.preparation import tokens_a_pass

log = logging.getLogger(__name__)
_TOKENS = "GPT2_FP8_TOKENS_A_PASS"  # rank 0's count, in the environment of the processes that Lightning starts
_SHOWN = 5  # steps; a longer list helps nobody


class Length(NamedTuple):
    """How long a run is.

    Attributes:
        config: the run's, with its number of steps as `trainer.max_steps`.
        limit: the key of the limit that gives this number.
        epoch_ends: the last step of each epoch, if `callbacks.keep_epochs` asks for their checkpoints.
    """

    config: RunConfig
    limit: str
    epoch_ends: list[int]


def resolve_length(config: RunConfig, rank: int, typed: Container[str] = (), drawn: bool = False) -> Length:
    """Turn the limits of a run into its number of steps. For `max_epochs` the text's tokens are counted.

    A warm-up that is not among the keys `typed` is fitted to that number, and the log says so. Rank 0 counts for the
    processes that Lightning starts. Under another launcher each rank counts, and finds the same number. Raises
    UserError if what was typed does not fit, unless it is only `drawn`, and what reading the text raises.
    """
    if config.trainer.max_epochs is None or config.trainer.fast_dev_run:
        if not run_length.limits(config):  # a single step comes to no epoch
            config = replace(config, trainer=replace(config.trainer, max_steps=1))
        return _shortest(config, None, [])
    tokens = int(os.environ.get(_TOKENS, 0)) if rank else 0
    tokens = tokens or tokens_a_pass(config.data, config.model.n_positions, tuple(config.plugins))
    os.environ[_TOKENS] = str(tokens)
    before, config = config.optim, run_length.fit_schedule(config, typed, tokens)
    for line in run_length.describe_schedule(before, config):
        log.info(line)
    allowed = list(run_length.misfits(config, tokens)) if drawn else []
    if found := [finding for finding in run_length.check(config, tokens) if finding not in allowed]:
        raise UserError(finding.problem for finding in found)
    ends = run_length.epoch_ends(config, tokens)
    when = f"they end at the steps {_listed(ends)}" if ends else "none ends within this run"
    log.info("epochs     %s tokens each; %s", f"{tokens:,}", when)
    return _shortest(config, tokens, ends if config.callbacks.keep_epochs else [])


def _shortest(config: RunConfig, tokens_a_pass: int | None, epoch_ends: list[int]) -> Length:
    """Let the shortest limit hold. The log says which one, if there are several."""
    known, limit = run_length.limits(config, tokens_a_pass), run_length.shortest(config, tokens_a_pass)
    if len(known) > 1:
        longer = ", ".join(f"{key} at step {step}" for key, step in known.items() if key != limit)
        log.info("length     %s ends the run at step %d, and not %s", limit, known[limit], longer)
    return Length(run_length.in_steps(config, tokens_a_pass), limit, epoch_ends)


def _listed(steps: list[int]) -> str:
    """Return steps as a line of text, without those in the middle of a long list."""
    words = [str(step) for step in steps]
    return ", ".join(words if len(words) <= _SHOWN else [*words[: _SHOWN - 2], "...", words[-1]])

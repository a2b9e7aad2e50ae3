"""The number of steps of a run: what its limits come to on its text. The log says which of them holds."""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import replace
from typing import NamedTuple

from gpt2_fp8.config import run_length
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.preparation import tokens_a_pass

log = logging.getLogger(__name__)


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


def resolve_length(config: RunConfig, typed: Container[str] = ()) -> Length:
    """Turn the limits of a run into its number of steps. For `max_epochs` the text's tokens are counted.

    A warm-up that is not among the keys `typed` is fitted to that number, and the log says so. Each rank counts, and
    finds the same number. Raises UserError if what was typed does not fit, and what reading the text raises.
    """
    tokens, kept_ends = None, []
    if config.trainer.max_epochs is not None and not config.trainer.fast_dev_run:
        tokens = tokens_a_pass(config.data, config.model.n_positions, tuple(config.plugins))
        before, config = config.optim, run_length.fit_schedule(config, typed, tokens)
        for line in run_length.describe_schedule(before, config):
            log.info(line)
        if found := list(run_length.check(config, tokens)):
            raise UserError(found)
        ends = run_length.epoch_ends(config, tokens)
        shown = ", ".join(map(str, ends if len(ends) <= 5 else [*ends[:3], "...", ends[-1]]))
        when = f"they end at the steps {shown}" if ends else "none ends within this run"
        log.info("epochs     %s tokens each; %s", f"{tokens:,}", when)
        kept_ends = ends if config.callbacks.keep_epochs else []
    elif not run_length.limits(config):  # a single step comes to no epoch
        config = replace(config, trainer=replace(config.trainer, max_steps=1))
    known, limit = run_length.limits(config, tokens), run_length.shortest(config, tokens)
    if len(known) > 1:
        longer = ", ".join(f"{key} at step {step}" for key, step in known.items() if key != limit)
        log.info("length     %s ends the run at step %d, and not %s", limit, known[limit], longer)
    return Length(run_length.in_steps(config, tokens), limit, kept_ends)

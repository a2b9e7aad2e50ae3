"""How long a run is, and each rank's share of a step. A run's limits come to optimizer steps; the least of them holds.

Limits that were typed replace those of a group's file.
`max_tokens` is a budget: the run ends at the last step that stays within it (floor). `max_epochs` is a goal: the run
ends at the first step by which so many passes' tokens were used (ceil). `max_time` gives no steps. It only stops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2_fp8.config.data_schema import FileOrHubData, HubData, MixtureData
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import problem
from gpt2_fp8.config.schema import OptimConfig, RunConfig

_LIMITS = ("max_steps", "max_tokens", "max_epochs")
PATIENCE = "callbacks.early_stopping_patience"
EARLY = ("trainer.max_time", PATIENCE)  # keys that end a run before the end of its schedule
_TIME = re.compile(r"(\d{1,5}):(\d\d):(\d\d):(\d\d)")  # as Lightning's `Timer` takes it


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor up to `most`; of a number beyond 10^12, of those with a factor up to a million."""
    small = [d for d in range(1, min(math.isqrt(number), 10**6) + 1) if number % d == 0]
    return max(d for one in small for d in (one, number // one) if d <= most)


def tokens_a_step(config: RunConfig) -> int:
    """Return how many tokens a step trains on, over all ranks."""
    return config.global_batch_size * config.model.n_positions


def known_ranks(config: RunConfig) -> int:
    """Return how many ranks a run has; of `trainer.devices=auto` at least."""
    devices = config.trainer.devices
    return (1 if devices == "auto" else devices) * config.trainer.num_nodes


def limits(config: RunConfig, tokens_a_pass: int | None = None) -> dict[str, int]:
    """Return the step at which each limit ends the run, by its key. `tokens_a_pass`: None if no text was counted."""
    options, step = config.trainer, tokens_a_step(config)
    found: dict[str, int] = {}
    if options.max_steps is not None:
        found["trainer.max_steps"] = options.max_steps
    if options.max_tokens is not None:
        found["trainer.max_tokens"] = options.max_tokens // step
    if options.max_epochs is not None and tokens_a_pass is not None:
        found["trainer.max_epochs"] = -(-options.max_epochs * tokens_a_pass // step)
    return found


def epoch_ends(config: RunConfig, tokens_a_pass: int) -> list[int]:
    """Return the last step of each epoch that ends within the run: the first by which its tokens were used."""
    step, last = tokens_a_step(config), last_step(config, tokens_a_pass)
    ends = {-(-epoch * tokens_a_pass // step) for epoch in range(1, (config.trainer.max_epochs or 0) + 1)}
    return sorted(end for end in ends if end <= last)


def shortest(config: RunConfig, tokens_a_pass: int | None = None) -> str:
    """Return the key of the limit that ends the run, of those that are known."""
    found = limits(config, tokens_a_pass)
    return min(found, key=lambda key: found[key])


def last_step(config: RunConfig, tokens_a_pass: int | None = None) -> int:
    """Return the step after which the run ends. `tokens_a_pass`: None once `max_epochs` is counted (`in_steps`)."""
    return min(limits(config, tokens_a_pass).values())


def bf16_last_steps(config: RunConfig) -> int:
    """Return how many steps at the end of a run in FP8 compute in bf16; 0 for another precision."""
    return getattr(config.precision, "bf16_last_steps", 0)


def steps_in_fp8(config: RunConfig) -> int:
    """Return after how many steps a run in FP8 computes in bf16: `last_step` if it never does, as `fast_dev_run`."""
    return last_step(config) - (0 if config.trainer.fast_dev_run else bf16_last_steps(config))


def steps_to_run(config: RunConfig) -> int:
    """Return how many steps a run whose epochs are counted goes through: `last_step`, or one with `fast_dev_run`."""
    return 1 if config.trainer.fast_dev_run else last_step(config)


def in_steps(config: RunConfig, tokens_a_pass: int | None) -> RunConfig:
    """Return the configuration with what its limits come to as its `max_steps`."""
    return replace(config, trainer=replace(config.trainer, max_steps=last_step(config, tokens_a_pass)))


def fit_length(config: RunConfig, typed: Container[str]) -> RunConfig:
    """Drop the limits of a group's file where another one is `typed`."""
    given = [name for name in _LIMITS if getattr(config.trainer, name) is not None]
    of_groups: dict[str, Any] = {name: None for name in given if f"trainer.{name}" not in typed}
    if len(of_groups) == len(given):
        return config
    return replace(config, trainer=replace(config.trainer, **of_groups))


def fit_schedule(config: RunConfig, typed: Container[str], tokens_a_pass: int | None = None) -> RunConfig:
    """Fit warm-up and decay, which a group's file means for its own number of steps, to the run unless `typed`."""
    known, optim = limits(config, tokens_a_pass), config.optim
    steps = min(known.values(), default=0)
    if steps < 1:
        return config
    if optim.warmup_steps > steps and "optim.warmup_steps" not in typed:
        optim = replace(optim, warmup_steps=steps // 10)
    rest = steps - optim.warmup_steps
    if optim.decay_steps is not None and optim.decay_steps > rest > 0 and "optim.decay_steps" not in typed:
        optim = replace(optim, decay_steps=max(1, rest // 5))
    return config if optim == config.optim else replace(config, optim=optim)


def describe_schedule(before: OptimConfig, config: RunConfig) -> Iterator[str]:
    """Yield in words what `fit_schedule` has made of the settings `before`."""
    for key, what in (("warmup_steps", "warm-up"), ("decay_steps", "decay")):
        if (was := getattr(before, key)) != (now := getattr(config.optim, key)):
            yield f"{what:<10} {now:,} steps instead of {was:,}, which do not fit the run; optim.{key}=NUMBER sets them"


def fit_micro_batch(config: RunConfig, world_size: int, typed: Container[str]) -> RunConfig:
    """Lower the micro-batch to a divisor of a rank's share, unless it is `typed`."""
    micro, whole = config.micro_batch_size, config.global_batch_size
    if micro == "auto" or whole % world_size or "micro_batch_size" in typed:
        return config
    fits = largest_divisor(whole // world_size, micro)
    return config if fits == micro else replace(config, micro_batch_size=fits)


def describe_micro_batch(before: RunConfig, config: RunConfig) -> Iterator[str]:
    """Yield in words what `fit_micro_batch` has made of the micro-batch of `before`."""
    if (was := before.micro_batch_size) != (now := config.micro_batch_size):
        yield (
            f"micro-batch {now} instead of {was}, which does not divide a process's share of the "
            f"{config.global_batch_size} sequences of a step; micro_batch_size=NUMBER sets it"
        )


def seconds(time: str) -> int | None:
    """Return a `max_time` in seconds; None if it is not of the form DD:HH:MM:SS."""
    if not (match := _TIME.fullmatch(time)):
        return None
    days, hours, minutes, rest = map(int, match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def as_time(seconds: int) -> str:
    """Return seconds as a `max_time`."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24:02d}:{hours % 24:02d}:{minutes:02d}:{rest:02d}"


def check(config: RunConfig, tokens_a_pass: int | None = None) -> Iterator[Problem]:
    """Find limits that cannot be met, and a warm-up or a decay that does not fit between them."""
    if config.trainer.max_time is not None and not seconds(config.trainer.max_time):
        reason = "must be a time above 0, as days:hours:minutes:seconds"
        yield problem(config, "trainer.max_time", reason, "trainer.max_time=00:12:00:00")
    yield from _check_epochs(config)
    if not (known := limits(config, tokens_a_pass)):
        if config.trainer.max_epochs is None:
            keys = "trainer.max_steps trainer.max_tokens trainer.max_epochs"
            yield problem(config, keys, "the learning rate needs an end of the run, in steps")
    elif min(known.values()) < 1:
        yield problem(config, "trainer.max_tokens", f"a step has {tokens_a_step(config):,} tokens")
    else:
        yield from _check_steps(config, min(known.values()), shortest(config, tokens_a_pass))


def _check_steps(config: RunConfig, steps: int, limit: str) -> Iterator[Problem]:
    """Find steps of one kind that do not fit a run of `steps`, which the key `limit` ends."""
    warmup, decay = config.optim.warmup_steps, config.optim.decay_steps
    if warmup > steps:
        yield problem(config, f"{limit} optim.warmup_steps", "the warm-up is longer than the run")
    elif decay is not None and decay > steps - warmup:
        keys = f"optim.decay_steps {limit} optim.warmup_steps"
        yield problem(config, keys, "the decay is longer than what follows the warm-up")
    if bf16_last_steps(config) >= steps:
        yield problem(config, f"precision.bf16_last_steps {limit}", "no step would compute in FP8")
    if config.optim.ema_start_step >= steps:
        yield problem(config, f"optim.ema_start_step {limit}", "no step would be in the average of weights")
    if config.optim.schedule == "warmup_stable_decay" and decay is None:
        reason = "the steps at the end in which the rate falls are not given"
        yield problem(config, "optim.schedule optim.decay_steps", reason)


def _check_epochs(config: RunConfig) -> Iterator[Problem]:
    """Find passes over a text that has none, or whose length nobody knows before the first is over."""
    data, key = config.data, "trainer.max_epochs"
    if config.trainer.max_epochs is None:
        if config.callbacks.keep_epochs:
            yield problem(config, f"callbacks.keep_epochs {key}", "no epochs are counted")
        return
    if isinstance(data, MixtureData):
        yield problem(config, f"{key} data.kind", "each source of a mixture has passes of its own")
    if config.trainer.overfit_batches:
        yield problem(config, f"{key} trainer.overfit_batches", "the first steps' data is repeated, and no passes made")
    here = isinstance(data, FileOrHubData) and Path(data.path).expanduser().is_file()
    if isinstance(data, HubData) and not here:
        yield problem(config, f"{key} data.repo", "a hub's text is streamed, and its tokens are not counted before")

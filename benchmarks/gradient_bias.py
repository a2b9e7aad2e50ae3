"""Is FP8's error of the gradient noise, or has it a direction? Measures both at a run's weights, by kind of parameter.

    python benchmarks/gradient_bias.py RUN --conditions rows.txt --batches 64 -- model=gpt2 data=fineweb ...

Each line of the file is a condition, `NAME: WORDS`; the first is what the others are compared with, as bf16. The words
after `--` are those of the run. Its last checkpoint's weights are given to a model of every condition. Each computes
the gradients of the same batches, of the training text in its order, and none is updated. So a row chooses how they are
computed, and penalties. What decides weights and batches stands after `--`, for all conditions.

For each kind of parameter, with g a batch's gradient in the first condition and h in another:

- `error`: |h - g| / |g|, the root of both mean squares over the batches. It is what one step has.
- `bias`: |mean(h - g)| / |mean g| over all batches. It is what no number of steps averages out.
- `noise`: what `bias` would be if the errors of different batches had nothing in common.
- `slope`: mean h along mean g, over |mean g|. Below 1, the gradient is shorter without being turned.
- `loss`: how far the loss of another condition, with its penalties, is above, at the same weights.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from words import Parser

from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.fp8.resolve import resolve
from gpt2_fp8.model.loss import trained_loss
from gpt2_fp8.runtime import devices, registry
from gpt2_fp8.train import trained

EMULATED = "precision.backend=emulated recipe=delayed compile=false"


class Errors:
    """How far one condition's gradients are from the first's, summed over batches, by kind of parameter."""

    def __init__(self) -> None:
        self.loss, self.sums = 0.0, dict[str, Tensor]()
        self.squares: dict[str, float] = defaultdict(float)

    def add(self, loss: float, difference: dict[str, Tensor]) -> None:
        """Add a batch's."""
        self.loss += loss
        for name, value in difference.items():
            self.squares[kind(name)] += value.square().sum().item()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def products(self, other: Errors) -> dict[str, float]:
        """Return the inner product of two sums over batches."""
        found: dict[str, float] = defaultdict(float)
        for name, value in self.sums.items():
            found[kind(name)] += (value * other.sums[name]).sum().item()
        return found


def kind(name: str) -> str:
    """Return what a parameter of a block is called in every block."""
    return re.sub(r"\.\d+\.", ".*.", name)


def main(argv: list[str]) -> int:
    """Measure what the command line asks for. Returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("run", help="a run's folder, or a checkpoint")
    parser.add_argument("--conditions", required=True, help="a file of lines NAME: WORDS")
    parser.add_argument("--batches", type=int, default=64)
    asked, words = parser.split(argv)
    conditions = parser.conditions(asked.conditions)
    if len(conditions) < 2:
        parser.error("--conditions has one row, and others are compared with it")
    configs = {name: parser.composed([*words, *own]) for name, own in conditions.items()}
    if any(config.model.dropout for config in configs.values()):
        parser.error("model.dropout is not 0: each condition would leave out other numbers")
    try:
        print(measure(asked.run, configs, asked.batches))
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def measure(run: str, configs: dict[str, RunConfig], batches: int) -> str:
    """Return the tables of all conditions but the first. Raises RunError."""
    first, *others = configs
    registry.load(configs[first].plugins, Path.cwd())
    found = trained.load(run, "last")
    trained.refuse(list(trained.other_settings(configs[first].model, asdict(found.config.model))))
    models = {name: _gradients(name, config, dict(found.weights)) for name, config in configs.items()}
    errors = {name: Errors() for name in configs}
    count = 0
    for ids in _batches(configs[first], batches):
        given = None
        for name, made in models.items():
            loss, gradients = _step(made, ids, configs[name].micro_batch, calibrate=count == 0)
            if given is None:
                given = loss, gradients
                errors[name].add(loss, gradients)
            else:
                difference = {key: value - given[1][key] for key, value in gradients.items()}
                errors[name].add(loss - given[0], difference)
        count += 1
    return "\n\n".join(_table(name, errors[name], errors[first], count) for name in others)


def _gradients(name: str, config: RunConfig, weights: dict[str, Tensor]) -> Gradients:
    device = devices.device(config)
    plan = resolve(config, device)
    if plan.ran != plan.asked:
        cause = f"{name}: precision={plan.asked} would run in {plan.ran} here: {plan.reason}"
        raise UserError.of(cause, f"measure it where it runs, or emulate it: {EMULATED}")
    with torch.device(device):
        model = plan.backend.build(vocabulary(config))
    model.load_state_dict(weights)
    return Gradients(plan, model, plan.backend.scaling(model), Tensor.backward)


def _batches(config: RunConfig, count: int) -> Iterator[Tensor]:
    data = TokenDataModule.from_config(config)
    data.prepare_data()
    data.setup("fit")
    for batch in islice(data.train_dataloader(), count):
        yield batch["ids"].to(devices.device(config))


def _step(made: Gradients, ids: Tensor, micro_batch: int, calibrate: bool) -> tuple[float, dict[str, Tensor]]:
    """Return a batch's loss, and copies of its gradients by name."""
    if calibrate and made.plan.fp8:
        made.calibrate(ids, micro_batch)
    made.model.zero_grad(set_to_none=True)
    loss = trained_loss(made.of_step(ids, micro_batch)).item()
    return loss, {name: p.grad.float().clone() for name, p in made.model.named_parameters() if p.grad is not None}


def _table(name: str, found: Errors, first: Errors, batches: int) -> str:
    parts = found.squares, found.products(found), first.squares, first.products(first), found.products(first)
    width = max(map(len, found.squares))
    lines = [f"{name}: loss {found.loss / batches:+.5f}", f"{'gradient of':{width}}   error    bias   noise   slope"]
    for part in (None, *found.squares):
        error, mean, own, own_mean, along = (sum(p.values()) if part is None else p[part] for p in parts)
        if own and own_mean:
            ratios = *map(math.sqrt, (error / own, mean / own_mean, error / own_mean)), 1 + along / own_mean
        else:  # no gradient, as of a batch whose text is known by heart
            ratios = (math.nan,) * 4
        lines.append(f"{part or 'all':{width}}  " + "  ".join(f"{ratio:6.4f}" for ratio in ratios))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

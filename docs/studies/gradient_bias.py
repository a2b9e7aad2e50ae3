"""Is FP8's error of the gradient noise, or has it a direction? Measures both at a run's weights, by kind of parameter.

    python docs/studies/gradient_bias.py RUN --conditions rows.txt --batches 64 -- model=gpt2 data=fineweb ...

Each line of the file is a condition, `NAME: WORDS`; the first is what the others are compared with, as bf16. The words
after `--` are those of the run. Its last checkpoint's weights are given to a model of every condition. Each computes
the gradients of the same batches, of the training text in its order, and none is updated. So a row chooses how they are
computed (`FOLLOWED`), and penalties. What decides weights and batches stands after `--`, for all conditions.

For each kind of parameter, with g a batch's gradient in the first condition and h in another:

- `error`: |h - g| / |g|, the root of both mean squares over the batches. It is what one step has.
- `bias`: |mean(h - g)| / |mean g| over all batches. It is what no number of steps averages out.
- `noise`: what `bias` would be if the errors of different batches had nothing in common.
- `slope`: mean h along mean g, over |mean g|. Below 1, the gradient is shorter without being turned.
- `loss`: how far the loss of another condition, with its penalties, is above, at the same weights.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import program
import rows
import torch
import undecided
from rows import Leg
from torch import Tensor

from gpt2_fp8.backends.resolve import resolve
from gpt2_fp8.checkpoint.errors import CheckpointError
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import Problem, RunError, UserError
from gpt2_fp8.config.run_length import last_step, limits
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.model import penalty as penalties
from gpt2_fp8.runtime import devices, registry
from gpt2_fp8.runtime.arguments import Parser
from gpt2_fp8.train import resume, trained

EMULATED = "precision.backend=emulated recipe=delayed compile=false"
FOLLOWED = (  # keys, with those below them, that a row may set: how gradients are computed, and of which loss
    "precision", "recipe", "penalty", "compile", "compile_mode", "cuda_graphs", "attention", "document_mask",
    "activation_checkpointing", "micro_batch_size",
)  # fmt: skip


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
    mark = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's folder, or a checkpoint")
    parser.add_argument("--conditions", required=True, help="a file of lines NAME: WORDS")
    parser.add_argument("--batches", type=int, default=64)
    try:
        asked = parser.parse_args(argv[:mark])
        if asked.batches < 1:
            raise UserError.of("--batches is less than 1", "--batches 64")
        print(measure(asked.run, rows.read(asked.conditions), asked.batches, argv[mark + 1 :]))
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def measure(run: str, conditions: Mapping[str, tuple[Leg, ...]], batches: int, words: list[str]) -> str:
    """Return the tables of all conditions but the first. Raises UserError."""
    configs = _composed(conditions, words, batches)
    first, *others = configs
    registry.load(configs[first].plugins, Path.cwd())
    try:
        found = trained.load(run, "last")
    except CheckpointError as error:
        raise UserError.of(
            error.problems[0].cause, "name a run's folder, or a checkpoint's, as the first word"
        ) from None
    resume.refuse(list(resume.other_settings(configs[first].model, asdict(found.config.model))))
    models = {name: _gradients(name, config, dict(found.weights)) for name, config in configs.items()}
    errors = {name: Errors() for name in configs}
    for i, ids in enumerate(_batches(configs[first], batches)):
        given = None
        for name, made in models.items():
            loss, gradients = _step(made, ids, configs[name].micro_batch, calibrate=i == 0)
            if given is None:
                given = loss, gradients
                errors[name].add(loss, gradients)
            else:
                difference = {key: value - given[1][key] for key, value in gradients.items()}
                errors[name].add(loss - given[0], difference)
    return "\n\n".join(_table(name, errors[name], errors[first], batches) for name in others)


def _composed(conditions: Mapping[str, tuple[Leg, ...]], words: list[str], batches: int) -> dict[str, RunConfig]:
    """Return what the words of each condition come to. Raises UserError, also for what has no gradients to compare."""
    if len(conditions) < 2:
        raise UserError.of("--conditions has one row, and others are compared with it", "add a row")
    problems: rows.Problems = {}
    found = {name: rows.composed(name, [*words, *legs[0].words], {}, problems) for name, legs in conditions.items()}
    for name, config in found.items():
        if len(conditions[name]) > 1:
            problems[Problem("@STEP changes a run's words, and nothing is trained here", "leave it out")] = name
        keys = [key for _, key in rows.keyed(conditions[name][0].words) if key.partition(".")[0] not in FOLLOWED]
        if keys:
            cause = f"{', '.join(keys)}: a row changes neither the weights nor the batches, which all conditions share"
            problems.setdefault(Problem(cause, "leave it out, or give it after -- for all conditions"), name)
        for problem in () if config is None else _unfit(config, batches):
            problems.setdefault(problem, name)
    rows.refuse(problems)
    return {name: config for name, config in found.items() if config is not None}


def _unfit(config: RunConfig, batches: int) -> Iterator[Problem]:
    """Yield why there are no gradients of a condition, or none that can be compared."""
    if open_ := list(undecided.problems(config)):
        yield from open_
    elif batches > (steps := last_step(config)):
        cause = f"--batches {batches}, and the run has {steps}: one a step"
        longer = f", or trainer.max_steps={batches} after --" if list(limits(config)) == ["trainer.max_steps"] else ""
        yield Problem(cause, f"--batches {steps}{longer}")
    if config.trainer.overfit_batches:
        cause = f"trainer.overfit_batches={config.trainer.overfit_batches}: equal batches have equal errors"
        yield Problem(cause, "trainer.overfit_batches=0")
    if config.model.dropout:
        cause = f"model.dropout={config.model.dropout}: each condition would leave out other numbers"
        yield Problem(cause, "model.dropout=0")


def _gradients(name: str, config: RunConfig, weights: dict[str, Tensor]) -> Gradients:
    device = devices.device(config)
    plan = resolve(config, device)
    if plan.ran != plan.asked:
        cause = f"{name}: precision={plan.asked} would run in {plan.ran} here: {plan.reason}"
        raise UserError.of(cause, f"measure it where it runs, or emulate it: {EMULATED}")
    with torch.device(device):
        model = plan.backend.build(vocabulary(config))
    resume.refuse_other_weights(model.state_dict(), weights)
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
    loss = penalties.trained(made.of_step(ids, micro_batch)).item()
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
    program.run(main)

"""Tokens a second of a bare loop: a model, an optimizer and `for`, without Trainer, loader, log or checkpoints.

    python docs/studies/bare_loop.py --micro-batch 64 -- model=gpt2 data.tokenizer=gpt2 global_batch_size=128

The words after `--` are those of a run; what they say of text, logs and checkpoints is not used. Model, step and clock
are the benchmark's. Tokens are random, of the vocabulary that the words come to.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import program
import torch
import undecided

from gpt2_fp8 import compose
from gpt2_fp8.backends.resolve import Plan, resolve
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.measure import worker
from gpt2_fp8.runtime import devices
from gpt2_fp8.runtime.arguments import Parser


class Loop:
    """A model and its optimizer, ready for steps on random tokens."""

    def __init__(self, config: RunConfig, plan: Plan):
        self.config, self.plan = config, plan
        self.step = worker.built(config, plan, vocabulary(config))

    def rates(self, steps: int) -> list[float]:
        """Train some steps, each on random ids of its own. Returns the tokens a second of each."""
        config, device = self.config, self.plan.device
        shape = (config.global_batch_size, config.model.n_positions + 1)
        ids = [torch.randint(vocabulary(config), shape, dtype=torch.int32, device=device) for _ in range(steps)]
        return [tokens_a_step(config) / seconds for seconds in worker.timed(self.step, ids, device)]

    def __str__(self) -> str:
        config, plan = self.config, self.plan
        where = torch.cuda.get_device_name() if plan.device == "cuda" else "the CPU"
        size = f"{config.global_batch_size} x {config.model.n_positions} tokens, {config.micro_batch} at a time"
        ran = f"{plan.ran} ({plan.recipe})" if plan.recipe else plan.ran
        why = f" instead of {plan.asked}: {plan.reason}" if plan.reason else ""
        return f"{config.model.name} on {where}, {size}\n{plan.backend.label}, {ran}{why}"


def main(argv: list[str] | None = None) -> int:
    """Measure the loop that the command line asks for. Returns the exit code."""
    try:
        asked, words = read(options(), sys.argv[1:] if argv is None else argv)
        loop = built(words)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(loop)
    loop.rates(asked.warmup)
    print(told(loop.rates(asked.steps)))
    return 0


def parser(description: str | None) -> Parser:
    """Return a parser of what both programs take that have a bare loop."""
    found = Parser(
        usage="%(prog)s [options] -- [words of a run]", description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    found.add_argument("--precision", default="fp8_hybrid", choices=("fp8_hybrid", "fp8_e4m3", "bf16", "fp32"))
    found.add_argument("--backend", help="precision.backend")
    found.add_argument("--recipe", help="recipe")
    found.add_argument("--micro-batch", type=int, help="micro_batch_size")
    found.add_argument("--warmup", type=int, default=5, help="steps before them: compilation, calibration, the clock")
    return found


def options() -> Parser:
    """Return a parser of what this program takes."""
    found = parser(__doc__)
    found.add_argument("--steps", type=int, default=8, help="timed steps")
    return found


def read(found: Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the words of a run that they and what is after `--` come to. Raises UserError."""
    mark = argv.index("--") if "--" in argv else len(argv)
    asked = found.parse_args(argv[:mark])
    for name in ("warmup", "steps"):
        if getattr(asked, name, 1) < 1:
            raise UserError.of(f"--{name} is less than 1", f"--{name} 8")
    keys = {"precision": asked.precision, "precision.backend": asked.backend, "recipe": asked.recipe}
    keys["micro_batch_size"] = asked.micro_batch
    return asked, [*(f"{key}={value}" for key, value in keys.items() if value is not None), *argv[mark + 1 :]]


def built(words: list[str]) -> Loop:
    """Return the loop of a run's words. Raises UserError."""
    configs = compose.preflight(words)
    if len(configs) > 1:
        raise UserError.of(f"{len(configs)} runs are asked for", "leave out -m: a loop is one run")
    config = configs[0]
    if problems := list(undecided.problems(config)):
        raise UserError(problems)
    return Loop(config, resolve(config, devices.device(config)))


def told(rates: list[float]) -> str:
    """Say the tokens a second of steps."""
    slowest, median, fastest = min(rates), statistics.median(rates), max(rates)
    return f"{median:,.0f} tokens/s, the median of {len(rates)} steps (slowest {slowest:,.0f}, fastest {fastest:,.0f})"


if __name__ == "__main__":
    program.run(main)

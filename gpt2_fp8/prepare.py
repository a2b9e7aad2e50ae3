"""The token cache of a run, filled before it starts: from any data, over processes, resumable.

    python -m gpt2_fp8.prepare model=gpt2 data=fineweb data.cache_dir=cache data.num_workers=16
    python -m gpt2_fp8.prepare --all data=text_files data.train_files='[corpus/*.jsonl]' data.cache_dir=cache

The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_fp8 import compose
from gpt2_fp8.config import data_schema, run_length
from gpt2_fp8.config.data_schema import TextData
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.own_words import RUN
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import line
from gpt2_fp8.runtime import programs, registry

if TYPE_CHECKING:
    from gpt2_fp8.data.preparation import Job, Preparation


@programs.stoppable
@programs.exit_code
def main(argv: list[str]) -> None:
    """Run the command line `argv` (without the program's name)."""
    typed, configs = parse(argv)
    logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("gpt2_fp8").setLevel(logging.INFO)
    from gpt2_fp8.data.preparation import Job  # after what was typed is known to be right: it loads torch

    jobs: list[Job] = []
    for config in configs:
        if not any(isinstance(source, TextData) for _, source in data_schema.sources_of(config.data)):
            print(f"data={config.data.name}: nothing to prepare, since its files have token ids already")
            continue
        steps = None if typed.all else typed.steps or _count_steps(config)
        shape = config.model.n_positions, config.global_batch_size
        job = Job(config.data, *shape, steps, tuple(config.plugins), run_length.known_ranks(config))
        if job not in jobs:  # the jobs of a sweep often read the same text
            jobs.append(job)
    for job in jobs:
        _fill(job)
    if jobs:
        print(line(f"next: {shlex.join([*RUN.split(), *typed.words])}"))


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[RunConfig]]:
    """Return the program's own arguments and the runs' configurations. Raises UserError with every problem."""
    typed, words = _parser().parse_known_args(argv)
    typed.words = words
    configs = compose.preflight(words)
    if problems := [problem for config in configs for problem in _find_uncached(config)]:
        raise UserError(problems)
    return typed, configs


def _fill(job: Job) -> None:
    """Prepare one job, and print what the cache has, also if it ends early."""
    from gpt2_fp8.data.preparation import Preparation

    registry.load(job.plugins, Path.cwd())
    preparation = Preparation(job)
    complete = False
    try:
        preparation.run()
        complete = True
    finally:
        for text in _describe(preparation):
            print(line(text), flush=True)
        if not complete:
            print("not complete: the same command goes on from here", flush=True)


def _describe(preparation: Preparation) -> Iterator[str]:
    """Yield what the cache has, a line for each side of each source, and how much of it is new."""
    for (name, side), kept in sorted(preparation.kept.items()):
        odd = {what: n for what, n in kept.documents.as_dict().items() if n and what not in ("read", "long")}
        told = f"{kept.units:,} units, {kept.tokens:,} tokens, {kept.documents.read:,} documents"
        told += f"; skipped or repaired: {', '.join(f'{n:,} {what}' for what, n in odd.items())}" if odd else ""
        yield f"{f'{name} ' if name else ''}{side}: {told}"
    units, size = (sum(getattr(kept, of) for kept in preparation.kept.values()) for of in ("units", "size"))
    there = max(units - preparation.tokenised, 0)
    yield f"cache: {size / 1e6:,.1f} MB; {preparation.tokenised:,} units tokenised now, {there:,} were there"


def _count_steps(config: RunConfig) -> int | None:
    """Return how many steps' text a run needs; None: all of it, since a run counts the tokens of its epochs first."""
    if config.trainer.max_epochs is not None and not config.trainer.fast_dev_run:
        return None
    steps = run_length.steps_to_run(config)
    return min(steps, config.trainer.overfit_batches or steps)


def _find_uncached(config: RunConfig) -> Iterator[Problem]:
    """Find the sources whose tokens would be kept nowhere."""
    for name, source in data_schema.sources_of(config.data):
        if isinstance(source, TextData) and source.cache_dir is None:
            key = f"data.sources.{name}.cache_dir" if name else "data.cache_dir"
            yield Problem(f"{key}=null: no folder to keep the tokens in", f"add {key}=FOLDER, also to the run")


def _parser() -> argparse.ArgumentParser:
    parser = programs.parser(
        "prepare",
        "Tokenises what the run of the same words will read, into its data.cache_dir. The run then reads the cache "
        "alone. What is in the cache is not tokenised again, so a command that was stopped goes on.",
        "1 the cache could not be written; 4 the data source was lost; ",
        "data.num_workers=N is how many processes read and tokenise. docs/data.md says more.",
        usage="%(prog)s [--steps N | --all] [words of a run]",
        allow_abbrev=False,
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps",
        type=programs.positive,
        metavar="N",
        help="the text of the first N steps; without it, of the whole run",
    )
    length.add_argument("--all", action="store_true", help="the whole text, whatever the run needs of it")
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("prepare", main, once_a_node=True))

"""The number of processes of a job: a launcher's, where one has started them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path

from gpt2_fp8.config import rank_share
from gpt2_fp8.config.errors import Finding
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime.ranks import Ranks


def fitted(config: RunConfig, place: Ranks, typed: Container[str]) -> RunConfig:
    """Return the configuration with the launcher's number of processes, and a micro-batch that fits its ranks."""
    if place.launcher:
        strategy = "ddp" if place.several else config.trainer.strategy
        options = replace(config.trainer, devices=place.local_world_size, num_nodes=place.nodes, strategy=strategy)
        config = replace(config, trainer=options)
    known = 1 if config.trainer.devices == "auto" else config.trainer.devices * config.trainer.num_nodes
    return rank_share.fitted(config, known, typed, alone=place.launcher is None)


def continued(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration of a run that a launcher has started again: it continues from what `folder` holds.

    If nothing is saved there yet, the run begins as it did.
    """
    saved = any(folder.glob("checkpoints/*/manifest.json"))
    return replace(config, ckpt_path="last", init_from=None) if saved else config


def check(config: RunConfig, place: Ranks, typed: Container[str], alone: bool = True) -> Iterator[Finding]:
    """Find numbers of processes that the launcher has not started, and nodes without a launcher.

    `config` is as it was composed. A run that is not `alone` is a job of a sweep, whose launcher may start nodes.
    """
    options = config.trainer
    if place.launcher is None:
        if alone and options.num_nodes > 1:
            cause = f"trainer.num_nodes={options.num_nodes}, and nothing has started processes on other nodes"
            remedy = (
                f"torchrun --nnodes {options.num_nodes} --nproc-per-node GPUS --rdzv-backend c10d --rdzv-endpoint "
                "HOST:29500 -m gpt2_fp8.run on every node, or srun"
            )
            yield Finding.of("trainer.num_nodes", cause, remedy)
        return
    for key, asked, started in (
        ("trainer.devices", options.devices, place.local_world_size),
        ("trainer.num_nodes", options.num_nodes, place.nodes),
    ):
        if key in typed and asked not in (started, "auto"):
            cause = f"{key}={show(asked)}, and {place.launcher} has started {started}"
            yield Finding.of(key, cause, f"leave {key} out: the number is the launcher's")

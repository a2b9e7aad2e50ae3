"""The processes of a job, where a launcher has started them: their number is the launcher's."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from gpt2_fp8.config import rank_share
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import accelerate
from gpt2_fp8.runtime.launched import Launcher
from gpt2_fp8.runtime.variable_reader import VariableReader

_MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")  # without a port, each node would take one of its own


def fitted(config: RunConfig, launcher: Launcher, typed: Container[str]) -> RunConfig:
    """Return the configuration with the launcher's number of processes, and a micro-batch that fits its ranks."""
    if launcher.starts_all:
        strategy = "ddp" if launcher.several else config.trainer.strategy
        options = replace(
            config.trainer, devices=launcher.local_world_size, num_nodes=launcher.nodes, strategy=strategy
        )
        config = replace(config, trainer=options)
    known = 1 if config.trainer.devices == "auto" else config.trainer.devices * config.trainer.num_nodes
    return rank_share.fitted(config, known, typed, alone=not launcher.starts_all)


def continued(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration of a run that a launcher has started again: it continues from what `folder` holds.

    If nothing is saved there yet, the run begins as it did.
    """
    saved = any(folder.glob("checkpoints/*/manifest.json"))
    return replace(config, ckpt_path="last", init_from=None) if saved else config


def check(
    config: RunConfig, launcher: Launcher, typed: Container[str], environment: Mapping[str, str], alone: bool = True
) -> Iterator[Finding]:
    """Find processes that the launcher has not started or would divide a model, and nodes that could not meet.

    `config` is as it was composed. A run that is not `alone` is a job of a sweep, whose launcher says what it takes.
    """
    yield from (Finding(("trainer.strategy",), problem) for problem in accelerate.refused(environment))
    if not launcher.starts_all:
        if alone:
            yield from _own_nodes(config, environment)
        return
    started = {"trainer.devices": launcher.local_world_size, "trainer.num_nodes": launcher.nodes}
    for key, number in started.items():
        asked = getattr(config.trainer, key.partition(".")[2])
        if key in typed and asked not in (number, "auto"):
            per = "on each node" if key == "trainer.devices" else "nodes"
            cause = f"{key}={show(asked)}, and {launcher.name} has started {number} {_processes(key, number)}{per}"
            yield Finding((key,), Problem(cause, f"leave {key} out: the number is the launcher's"))


def _processes(key: str, number: int) -> str:
    return "" if key != "trainer.devices" else "process " if number == 1 else "processes "


def _own_nodes(config: RunConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Find what Lightning's own launcher, which is started once on each node, has not been told, or wrongly."""
    nodes = config.trainer.num_nodes
    if nodes == 1:
        return
    if lacking := [name for name in _MEETING_PLACE if not environment.get(name)]:
        listed = " and ".join(filter(None, (", ".join(lacking[:-1]), lacking[-1])))
        cause = f"trainer.num_nodes={nodes}, and {listed} {'are' if len(lacking) > 1 else 'is'} not set"
        remedy = (
            f"torchrun --nnodes {nodes} --nproc-per-node GPUS --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
            "-m gpt2_fp8.run on every node, or srun; or MASTER_ADDR=HOST MASTER_PORT=29500 NODE_RANK=0,1,..."
        )
        yield Finding(("trainer.num_nodes",), Problem(cause, remedy))
    read = VariableReader(environment)
    read.address()
    read.port(default=29500)
    if not read.problems and (node := read.number("NODE_RANK", 0)) >= nodes:
        read.refuse(f"NODE_RANK={node} is not below trainer.num_nodes={nodes}", "number the nodes from 0")
    yield from (Finding(("trainer.num_nodes",), problem) for problem in read.problems)

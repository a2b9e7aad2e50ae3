"""Before a run begins, the processes that a launcher has started tell each other what they have found.

What one of them refuses, all refuse. They agree on the folder, which is rank 0's, and see whether all nodes share it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch

from gpt2_fp8.config.errors import Problem, SharedRefusal, UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import devices
from gpt2_fp8.runtime.launched import ACCELERATE, VARIABLES
from gpt2_fp8.runtime.meeting import Meeting, join

__all__ = ["agree", "join"]

SHARED_SECONDS = 20.0  # in which a new file is seen on every node: network file systems remember what was not there
_LOOK_SECONDS = 0.5
_PER_NODE = {ACCELERATE: "--num_processes N", VARIABLES: "LOCAL_WORLD_SIZE=N"}


def agree(meeting: Meeting, config: RunConfig | None, folder: str | None, problems: Sequence[Problem]) -> Path:
    """Return the folder of the run, the same for all. Collective.

    Args:
        config, folder: what this process's command line comes to; None where it is refused.
        problems: why.

    Raises SharedRefusal with the problems of all ranks, and if they do not share the folder, or if their GPUs differ.
    """
    own: dict[str, Any] = {"host": socket.gethostname(), "folder": folder, "problems": list(problems), "gpu": None}
    own |= {"local_world_size": meeting.launcher.local_world_size}
    if config is not None:
        try:
            own["gpu"] = gpu(meeting, devices.device(config))
        except UserError as error:
            own["problems"] = list(error.problems)
    ranks = meeting.exchange("start", own)
    refuse(uneven(meeting.launcher.name, ranks))  # what else each finds wrong is wrong by its own count
    refuse([*told(ranks), *unequal(ranks)])
    agreed = Path(meeting.folder or ranks[0]["folder"])
    if meeting.launcher.several:  # variables need not tell how many nodes there are, and two containers are one host
        refuse(_unshared(meeting, agreed, [rank["host"] for rank in ranks]))
    if meeting.launcher.rank == 0:
        meeting.keep_folder(str(agreed))
    meeting.gathered = True
    return agreed


def gpu(meeting: Meeting, on: Literal["cuda", "cpu"]) -> dict[str, str] | None:
    """Return the name and the unique id of this process's GPU; None on a CPU.

    Raises UserError if there are more processes than GPUs.
    """
    if on == "cpu":
        return None
    own = torch.cuda.get_device_properties(devices.place(meeting.launcher, torch.cuda.device_count()))
    return {"name": own.name, "memory": f"{own.total_memory / 2**30:.0f} GiB", "id": str(own.uuid)}


def told(ranks: Sequence[dict[str, Any]]) -> list[Problem]:
    """Return the problems of all ranks, each once; one that not all have is said to be of the first that has it."""
    found: dict[tuple[str, str], list[int]] = {}
    for number, rank in enumerate(ranks):
        for cause, remedy in rank["problems"]:
            found.setdefault((cause, remedy), []).append(number)
    problems = []
    for (cause, remedy), having in found.items():
        of = "" if len(having) == len(ranks) else f"rank {having[0]} on {ranks[having[0]]['host']}: "
        problems.append(Problem(of + cause, remedy))
    return problems


def uneven(name: str, ranks: Sequence[dict[str, Any]]) -> list[Problem]:
    """Return a problem if the launcher `name` has not started as many processes on each node."""
    first = ranks[0]
    for number, rank in enumerate(ranks):
        if rank["local_world_size"] != first["local_world_size"]:
            counts = f"{first['local_world_size']} on {first['host']} and {rank['local_world_size']} on {rank['host']}"
            cause = f"{name} has started {len(ranks)} processes, {counts} (rank {number}): not as many on each node"
            return [Problem(cause, f"{_PER_NODE.get(name, '--nproc-per-node N')}, the same number on every node")]
    return []


def unequal(ranks: Sequence[dict[str, Any]]) -> list[Problem]:
    """Return a problem if ranks have no GPU of their own, or GPUs of different kinds. A step waits for the slowest."""
    seen: dict[str, int] = {}
    first = ranks[0]["gpu"]
    for number, rank in enumerate(ranks):
        own = rank["gpu"]
        if own is not None and (other := seen.setdefault(f"{rank['host']} {own['id']}", number)) != number:
            cause = f"ranks {other} and {number} on {rank['host']} would share one GPU, {own['name']}"
            return [Problem(cause, "start as many processes as there are GPUs, or trainer.accelerator=cpu")]
        if _kind(own) != _kind(first) and not rank["problems"] and not ranks[0]["problems"]:
            cause = f"rank {number} on {rank['host']} has {_kind(own)}, and rank 0 on {ranks[0]['host']} {_kind(first)}"
            return [Problem(cause, "take nodes with equal GPUs, or CUDA_VISIBLE_DEVICES with equal ones")]
    return []


def refuse(problems: Sequence[Problem]) -> None:
    """Raise SharedRefusal with the problems, if there are any."""
    if problems:
        raise SharedRefusal(problems)


def _kind(gpu: dict[str, str] | None) -> str:
    return "no GPU" if gpu is None else f"{gpu['name']} with {gpu['memory']}"


def _unshared(meeting: Meeting, folder: Path, hosts: Sequence[str]) -> list[Problem]:
    """Return a problem if a rank does not see what rank 0 has just written into the folder. Collective."""
    sign, first = folder / f".seen-by-all-{meeting.name}", meeting.launcher.rank == 0
    failed = None
    if first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sign.touch()
        except OSError as error:
            failed = f"{folder} cannot be written: {error.strerror}"
    (failed, *_) = meeting.exchange("written", failed)
    if failed:
        return [Problem(failed, "choose another folder: hydra.run.dir=FOLDER")]
    looked = meeting.exchange("looked", str(folder.absolute()))  # a relative one begins where each was started
    saw = meeting.exchange("seen", first or _sees(sign))
    if first:
        with suppress(OSError):
            sign.unlink()
    blind = [rank for rank, seen in enumerate(saw) if not seen]
    if not blind:
        return []
    there = f"rank {blind[0]} on {hosts[blind[0]]} in {looked[blind[0]]}"
    cause = f"what rank 0 writes on {hosts[0]} into {looked[0]} is not seen by {there}"
    remedy = "a folder on a file system that all nodes share: start in one, or hydra.run.dir=FOLDER"
    if looked[0] != looked[blind[0]]:
        remedy = (
            "start all processes in the same folder, which all nodes share; or hydra.run.dir=FOLDER, by its whole path"
        )
    return [Problem(f"the nodes do not share the folder of the run: {cause}", remedy)]


def _sees(sign: Path) -> bool:
    until = time.monotonic() + SHARED_SECONDS
    while True:
        with suppress(OSError):  # listing a folder asks its server; a name alone may be answered from memory
            if sign.name in os.listdir(sign.parent):
                return True
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_SECONDS)

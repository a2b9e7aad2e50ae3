"""Whole runs of several ranks, started as a person starts them: by trainer.devices, torchrun, srun or accelerate.

With RANKS_SHARE_A_GPU=1 on a machine with a single GPU, the ranks of a launch share it (`rank_faults.share`). By
trainer.devices no more processes are started than there are GPUs, so that srun's variables take its place then.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from tests.gpu.rank_faults import SECONDS
from tests.ports import free_port
from tests.ranks import SCRIPT, finish, srun

PATHS = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, PATHS))}
SHARED = torch.cuda.device_count() == 1 and os.environ.get("RANKS_SHARE_A_GPU") == "1"
AGENT = ["-m", "torch.distributed.run", "--max-restarts", "1"]


class Launch(NamedTuple):
    """A run, or a part of one."""

    words: list[str]
    launcher: str = "trainer.devices"
    gpus: int = 2  # processes; "two nodes" are two agents with half of them each
    faults: tuple[str, ...] = ()  # what of `rank_faults` is called in its processes


class Run(NamedTuple):
    """What became of the launches of a run, one after the other in one folder."""

    ends: list[tuple[list[int], str]]  # of each launch: its processes' exit codes, and what they printed
    gpus: int
    folder: Path

    @property
    def codes(self):
        return self.ends[-1][0]

    @property
    def output(self):
        return self.ends[-1][1]

    def steps(self):
        """{column: its values} of the notes of all steps, each as it was computed last. They have to be the same on
        all ranks: losses, scales and weights bit for bit, and the sizes of micro-batches."""
        files = sorted(self.folder.parents[1].glob("rank-*"))
        assert len(files) == self.gpus
        noted = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
        last = [{note["step"]: note for note in notes} for notes in noted]
        assert all(notes == last[0] for notes in last)
        return {column: [note[column] for note in last[0].values()] for column in noted[0][0]}


def run(cwd, launches):
    """Run the launches in a new folder. Fails where a process is left running."""
    cwd.mkdir()
    ends = []
    for launch in launches:
        first = ("share", "note") if SHARED and launch.gpus > 1 else ("note",)
        calls = "".join(f"rank_faults.{name}()\n" for name in (*first, *launch.faults))
        (cwd / "patched.py").write_text(SCRIPT.format(patch="from tests.gpu import rank_faults\n" + calls))
        processes = [_start(cwd, *command) for command in _commands(launch)]
        ended = [finish(process, SECONDS) for process in processes]
        ends.append(([code for code, _ in ended], "".join(output for _, output in ended)))
    return Run(ends, max(launch.gpus for launch in launches), cwd / "outputs/run")


def _commands(launch):
    """The commands of a launch, each with the variables that are its own."""
    own, gpus = ["patched.py", *launch.words, "run_name=run"], str(launch.gpus)
    match "srun" if SHARED and launch.gpus > 1 and launch.launcher == "trainer.devices" else launch.launcher:
        case "trainer.devices":
            return [([*own, f"trainer.devices={gpus}"], {})]
        case "torchrun":
            return [([*AGENT, "--standalone", "--nproc-per-node", gpus, *own], {})]
        case "two nodes":
            half, place = launch.gpus // 2, f"127.0.0.1:{free_port()}"
            agent = [*AGENT, "--nnodes", "2", "--nproc-per-node", str(half), "--rdzv-backend", "c10d"]
            command = [*agent, "--rdzv-endpoint", place, "--rdzv-id", place, *own]
            seen = [_visible(range(half * node, half * (node + 1))) for node in range(2)]
            return [(command, {"CUDA_VISIBLE_DEVICES": gpus}) for gpus in seen]
        case "srun":  # with --gpus-per-task=1
            variables = srun(count=launch.gpus)
            return [(own, variables(rank) | {"CUDA_VISIBLE_DEVICES": _visible([rank])}) for rank in range(launch.gpus)]
        case "accelerate":
            options = ["--multi_gpu", f"--num_processes={gpus}", "--num_machines=1", "--mixed_precision=no"]
            options += ["--dynamo_backend=no", f"--main_process_port={free_port()}"]
            return [(["-m", "accelerate.commands.launch", *options, *own], {})]
    raise ValueError(launch.launcher)


def _visible(numbers):
    """CUDA_VISIBLE_DEVICES with the GPUs of these numbers, of those that are seen here."""
    numbers = (0,) if SHARED else numbers
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return ",".join(names.split(",")[number] for number in numbers)


def _start(cwd, words, variables):
    return subprocess.Popen(
        [sys.executable, *words], cwd=cwd, env=os.environ | ENVIRONMENT | variables, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip

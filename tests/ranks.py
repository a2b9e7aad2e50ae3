"""Runs of several processes on a CPU, for tests: through the command line, by every launcher."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import forkserver
from tests.ports import free_port
from tests.runs import SMALL

# A rank's share of a step are two micro-batches, so that there is one without an exchange of gradients.
BATCH = ["micro_batch_size=2"]
WORDS = [*SMALL[1:], *BATCH, "trainer.accelerator=cpu"]  # no key says how many processes there are
TWO = [*SMALL[1:], *BATCH, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
ALONE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

# What a test changes in all processes: a launcher starts the same script for each.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from gpt2_fp8 import run
from gpt2_fp8.train.module import GPT2Module
from gpt2_fp8.train.run_end import Summary

original = GPT2Module.training_step

{patch}
if __name__ == "__main__":  # the workers that read data import this file
    sys.exit(run.main(sys.argv[1:]))
"""
# `happens` before a step of one rank, once in a run.
FAULT = """
def training_step(self, batch, batch_idx):
    if (self.global_rank, self.global_step) == ({rank}, {step}) and not Path("happened").exists():
        Path("happened").touch()
        {happens}
    original(self, batch, batch_idx)

GPT2Module.training_step = training_step
"""


def fault(rank, step, happens):
    """A patch. `happens`: a statement, or the name of a signal."""
    happens = f"os.kill(os.getpid(), signal.{happens})" if happens.startswith("SIG") else happens
    return FAULT.format(rank=rank, step=step, happens=happens)


def program(cwd, patch=""):
    """What follows `python` to run the program, with `patch` in all of its processes."""
    if not patch:
        return ["-m", "gpt2_fp8.run"]
    (cwd / "patched.py").write_text(SCRIPT.format(patch=patch))
    return ["patched.py"]


def start(cwd, *words, ranks=True, **environment):
    """`python WORDS` in a process group of its own. `ranks`: it starts other processes."""
    return forkserver.Popen(
        [sys.executable, *words],
        cwd=cwd, env=os.environ | ALONE | environment, text=True, start_new_session=True, ranks=ranks,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process, timeout=90):
    """The exit code and the output; fails where the run, or any process of it, is left after `timeout`."""
    try:
        output, _ = process.communicate(timeout=timeout)  # ends when the last process has closed its end
        for _ in range(100):
            if not group_is_alive(process.pid):
                return process.returncode, output
            time.sleep(0.1)
        raise AssertionError(f"a process is left behind:\n{output}")
    except subprocess.TimeoutExpired as late:
        output = late.output
        for each in descendants(process.pid):  # an agent's ranks are in sessions of their own
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that nobody adopted has the other end
            output = process.communicate(timeout=5)[0]
        raise AssertionError(f"not at its end after {timeout} s:\n{output}") from None
    finally:
        if group_is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def descendants(process):
    """The ids of a process and of all that it has started."""
    found = [process]
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def group_is_alive(group):
    """Whether a process of the group runs: one that has ended and was not waited for yet does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number = stat.read_text().rpartition(")")[2].split()[:3]
            if int(number) == group and state != "Z":
                return True
    return False


def run(cwd, *words, patch="", timeout=90, code=0, **environment):
    """The output of the command line, run to its end; fails where it ends with another code."""
    ended, output = finish(start(cwd, *program(cwd, patch), *words, **environment), timeout)
    assert ended == code, output
    return output


def torchrun(cwd, options, *words, patch=""):
    script = [] if patch else ["-m"]
    return start(cwd, "-m", "torch.distributed.run", *options, *script, *program(cwd, patch)[not patch :], *words)


def by_hand(count=2):
    """`variables(rank)` as a person sets them."""
    port = str(free_port())
    return lambda rank: {
        "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }  # fmt: skip


def srun(count=2):
    """`variables(rank)` as srun sets them for a task. srun itself is run by tests/slurm."""
    port = str(free_port())
    return lambda rank: {
        "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_NTASKS": str(count), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": str(count), "SLURM_STEP_NODELIST": "127.0.0.1",
        "MASTER_PORT": port,
    }  # fmt: skip


def tasks(cwd, variables, *words, patch="", count=2):
    """Every rank's exit code and output, started by nothing but `variables(rank)`."""
    words = [*program(cwd, patch), *words]
    return [finish(each) for each in [start(cwd, *words, ranks=False, **variables(rank)) for rank in range(count)]]

"""Two processes on a CPU, through the command line: Lightning runs it again for rank 1, and gloo joins the two."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from tests import forkserver
from tests.runs import SMALL, checkpoint, forked, metrics, summary, train, train_until

# A rank's share of a step are two micro-batches, so that there is one without an exchange of gradients.
BATCH = ["micro_batch_size=2"]
TWO = [*SMALL[1:], *BATCH, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
ALONE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
IN_THE_FOLDER = {".hydra", "checkpoints", "metrics.csv", "run.log", "summary.json", "tensorboard"}

# What a test changes in both processes: Lightning starts the same script again.
SCRIPT = """
import sys, time
from pathlib import Path
from gpt2_fp8 import run
from gpt2_fp8.train.module import GPT2Module
from gpt2_fp8.train.summary import Summary

original = GPT2Module.training_step

{patch}
if __name__ == "__main__":  # the workers that read data import this file
    sys.exit(run.main(sys.argv[1:]))
"""
RAISE = """
def training_step(self, batch, batch_idx):
    if self.global_rank in {ranks} and self.global_step == {step}:
        raise RuntimeError("the roof fell in")
    original(self, batch, batch_idx)

GPT2Module.training_step = training_step
"""
COUNT_EXCHANGES = """
from gpt2_fp8.runtime import roll_call
roll_call.STRANGER_SECONDS = 1000.0  # Lightning's ranks have more words than this process: they are no strangers
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from gpt2_fp8.runtime import collectives

average, start = collectives.average, GPT2Module.on_train_start

def counted(parameters):
    with Path(f"exchanges-{torch.distributed.get_rank()}").open("a") as file:
        file.write("once\\n")
    average(parameters)

def in_the_backward(state, bucket):
    Path("exchanged-in-a-backward").touch()
    return allreduce_hook(None, bucket)

def on_train_start(self):
    start(self)
    self.trainer.strategy.model.register_comm_hook(self, in_the_backward)

collectives.average, GPT2Module.on_train_start = counted, on_train_start
"""
STOP_AT_STEP_3 = """
import os, signal

def training_step(self, batch, batch_idx):
    if self.global_rank == 0 and self.global_step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    original(self, batch, batch_idx)

GPT2Module.training_step = training_step
"""
# Rank 1's data for step 4 does not come, and it is told to stop.
WAIT = """
import os, signal, threading, time
from gpt2_fp8.data.loaders import Steps
from gpt2_fp8.runtime import signals
from gpt2_fp8.runtime.collectives import rank_and_world

items = Steps._items
def _items(self):
    for item in items(self):
        if item["cursor"]["step"] == 4 and rank_and_world()[0] == 1:
            threading.Timer(1, os.kill, [os.getpid(), signal.SIGTERM]).start()
            with signals.interruptible():
                time.sleep(50)
        yield item

Steps._items = _items
"""
# There is none for rank 1's step 4.
LOST = """
from gpt2_fp8.config.errors import DataSourceLost
from gpt2_fp8.data.loaders import Steps
from gpt2_fp8.runtime.collectives import rank_and_world

items = Steps._items
def _items(self):
    for item in items(self):
        if item["cursor"]["step"] == 4 and rank_and_world()[0] == 1:
            raise DataSourceLost("cannot read anything")
        yield item

Steps._items = _items
"""
# Longer than Lightning waits between two looks at the processes that it started.
SLOW_SUMMARY = """
write = Summary.write
def slow_write(self, folder):
    time.sleep(6)
    return write(self, folder)

Summary.write = slow_write
"""

forked_with_ranks = partial(forkserver.Popen, ranks=True)


def start(tmp_path, *arguments, patch="", environment=ALONE, popen=forked_with_ranks):
    """The command in a process group of its own, with `patch` in all of its processes.

    With GPUs `popen` is `subprocess.Popen`: what the fork server imports sees none.
    """
    program = ["-m", "gpt2_fp8.run"]
    if patch:
        program = [str(tmp_path / "patched.py")]
        (tmp_path / "patched.py").write_text(SCRIPT.format(patch=patch))
    return popen(
        [sys.executable, *program, *arguments],
        cwd=tmp_path, env=os.environ | environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process, timeout=90):
    """The exit code and the output; fails where the run, or any process of it, is left after `timeout`."""
    try:
        output, _ = process.communicate(timeout=timeout)  # ends when the last process has closed its end
        for _ in range(100):
            if not _is_alive(process.pid):
                return process.returncode, output
            time.sleep(0.1)
        raise AssertionError(f"a process is left behind:\n{output}")
    finally:
        if _is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def _is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def run(tmp_path, *arguments, patch="", timeout=90, environment=ALONE):
    return finish(start(tmp_path, *arguments, patch=patch, environment=environment), timeout)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The same run of two processes, without a name; returns the folder it was typed in, and what it printed."""
    cwd = tmp_path_factory.mktemp("two")
    code, output = run(cwd, *TWO, patch=COUNT_EXCHANGES)
    assert code == 0, output
    return cwd, output


def the_run(cwd):
    (folder,) = (cwd / "outputs").iterdir()
    return folder


def assert_equal_but_for_rounding(folder, other):
    table, others = metrics(folder), metrics(other)
    for column in ("train_loss", "val_loss", "grad_norm", "lr", "tokens"):
        assert list(table[column]) == list(others[column]), column
        assert list(table[column].values()) == pytest.approx(list(others[column].values()), rel=1e-5), column


def test_one_folder_and_one_summary_of_two_processes(two):
    cwd, output = two
    assert set(os.listdir(cwd)) == {"outputs", "patched.py", "exchanges-0", "exchanges-1"}
    folder = the_run(cwd)
    assert set(os.listdir(folder)) - {"train_ddp_process_1.log"} == IN_THE_FOLDER
    report = summary(folder)
    assert (report["status"], report["steps"], report["tokens"]) == ("completed", 12, 12 * 8 * 32)
    assert "the CPU x 2" in output
    assert output.count("precision  fp32 instead of") == 1, "the ranks do not say the same twice"
    assert "Warning" not in output
    assert "recommended" not in output


def test_two_processes_compute_what_one_does(one, two):
    assert_equal_but_for_rounding(the_run(two[0]), one)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_two_processes_compute_in_fp8_what_one_does(tmp_path, recipe):
    """At a low rate: at a high one a run leaves its like exponentially, whatever makes the first bit of difference."""
    fp8 = [
        "precision=fp8_hybrid", "precision.backend=emulated", f"recipe={recipe}", "trainer.max_steps=50",
        "trainer.val_check_interval=50", "optim.lr=1e-4",
    ]  # fmt: skip
    train(tmp_path / "one", *BATCH, *fp8)
    code, output = run(tmp_path, *TWO, *fp8, "run_name=two")
    assert code == 0, output
    one, two = (metrics(folder)["train_loss"] for folder in (tmp_path / "one", tmp_path / "outputs/two"))
    assert list(two) == list(one) == list(range(1, 51))
    assert list(two.values()) == pytest.approx(list(one.values()), rel=5e-4)


DROPPED = """
import hashlib
import torch

dropout = torch.nn.Dropout.forward

def noted(self, x):
    if not self.training:
        return dropout(self, x)
    kept = dropout(self, torch.ones_like(x)).detach()
    with Path(f"dropped-{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}").open("a") as file:
        file.write(hashlib.sha256(kept.numpy().tobytes()).hexdigest() + "\\n")
    return x * kept

torch.nn.Dropout.forward = noted
"""


def dropped(cwd, rank):
    """The digests of a rank's dropout masks, in the order in which they were drawn."""
    return (cwd / f"dropped-{rank}").read_text().split()


def test_each_rank_has_dropout_masks_of_its_own(tmp_path):
    """Those of the first are one process's. A rank that is new in a run that goes on begins with its own."""
    words = ["model.dropout=0.2", "trainer.max_steps=4", "trainer.val_check_interval=4", "run_name=run"]
    for name in ("one", "two", "more"):
        (tmp_path / name).mkdir()
    one = ["trainer.accelerator=cpu", *SMALL[1:], *BATCH]
    assert run(tmp_path / "one", *one, *words, patch=DROPPED)[0] == 0
    code, output = run(tmp_path / "two", *TWO, *words, patch=DROPPED)
    assert code == 0, output
    alone, first, second = dropped(tmp_path / "one", 0), *(dropped(tmp_path / "two", rank) for rank in (0, 1))
    assert len(first) == len(second) == len(alone) // 2
    a_step = len(first) // 4
    assert first[:a_step] == alone[:a_step]
    assert not set(first) & set(second)
    (tmp_path / "one/outputs").rename(tmp_path / "more/outputs")
    longer = [*words, "trainer.max_steps=6", "ckpt_path=last"]
    code, output = run(tmp_path / "more", *TWO, *longer, patch=DROPPED)
    assert code == 0, output
    assert not set(dropped(tmp_path / "more", 0)) & set(dropped(tmp_path / "more", 1)), "after step 4"
    assert not set(dropped(tmp_path / "more", 1)) & set(second)


def test_gradients_are_exchanged_once_a_step(two):
    for rank in (0, 1):
        assert (two[0] / f"exchanges-{rank}").read_text().split() == ["once"] * 12
    assert not (two[0] / "exchanged-in-a-backward").exists()


def test_a_run_of_two_continues_with_one(tmp_path, one):
    code, output = run(tmp_path, *TWO, "run_name=run", patch=RAISE.format(ranks=(0, 1), step=8))
    assert code == 1, output
    assert checkpoint(tmp_path / "outputs/run", 8).is_dir()
    train(tmp_path / "outputs/run", *BATCH, "ckpt_path=last")
    assert_equal_but_for_rounding(tmp_path / "outputs/run", one)


def test_a_run_of_one_continues_with_two(tmp_path, one):
    train_until(4, tmp_path / "outputs/run", *BATCH)
    # The flag comes last: Lightning adds words of its own behind it.
    (tmp_path / "mine").mkdir()
    code, output = run(tmp_path, *TWO, "run_name=run", "ckpt_path=last", "-cd", "mine")
    assert code == 0, output
    assert_equal_but_for_rounding(tmp_path / "outputs/run", one)
    assert os.listdir(tmp_path / "outputs") == ["run"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_ends_the_other(tmp_path, rank):
    patch = (
        RAISE.format(ranks=(rank,), step=3) + "from gpt2_fp8.runtime import last_say\nlast_say.RANK_ZERO_SECONDS = 3.0"
    )
    code, output = run(tmp_path, *TWO, "run_name=run", patch=patch, timeout=60)
    assert code not in (0, None)
    assert "the roof fell in" in output
    if rank == 0:
        assert summary(tmp_path / "outputs/run")["message"] == "RuntimeError: the roof fell in"


KILL = """
import os, signal

def training_step(self, batch, batch_idx):
    if self.global_rank == {rank} and self.global_step == 3:
        os.kill(os.getpid(), signal.{name})
    original(self, batch, batch_idx)

GPT2Module.training_step = training_step
from gpt2_fp8.runtime import rank_watch
rank_watch.LIFE_SECONDS = 6.0
"""


NEVER_THERE = """
import os
from gpt2_fp8.runtime import patience
patience.PATIENCE_SECONDS = 8.0
if os.environ.get("LOCAL_RANK") == "1":
    time.sleep(1000)
"""


def test_a_rank_that_hangs_before_the_ranks_have_met_is_named(tmp_path):
    code, output = run(tmp_path, *TWO, "run_name=run", patch=NEVER_THERE, timeout=60)
    assert code == 1, output
    assert len(re.findall("waited [0-9]+ s in vain for rank 1", output)) == 1, output
    assert "Traceback" not in output


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_killed_or_hangs_is_named(tmp_path, name):
    code, output = run(tmp_path, *TWO, "run_name=run", patch=KILL.format(rank=1, name=name), timeout=60)
    assert code == 1, output
    message = "was killed by signal 9" if name == "SIGKILL" else "has shown no life for 6 s"
    report = summary(tmp_path / "outputs/run")
    assert report["message"].startswith("rank 1 ")
    assert message in report["message"]
    assert output.count(message) == 1
    assert "Traceback" not in output


def test_nothing_is_left_where_rank_0_is_killed(tmp_path):
    code, output = run(tmp_path, *TWO, "run_name=run", patch=KILL.format(rank=0, name="SIGKILL"), timeout=60)
    assert code == -9
    assert "rank 0 is gone" in output


def test_a_signal_in_one_ranks_wait_for_data_saves_the_run(tmp_path):
    code, output = run(tmp_path, *TWO, "run_name=run", patch=WAIT)
    assert code == 143, output
    assert summary(tmp_path / "outputs/run")["steps"] == 3
    assert checkpoint(tmp_path / "outputs/run", 3).is_dir()
    assert "Traceback" not in output


def test_data_that_one_rank_does_not_get_ends_the_run_saved(tmp_path):
    code, output = run(tmp_path, *TWO, "run_name=run", "trainer.log_every_n_steps=10", patch=LOST)
    assert code == 4, output
    assert summary(tmp_path / "outputs/run")["status"] == "data_lost"
    assert checkpoint(tmp_path / "outputs/run", 3).is_dir()
    assert "Traceback" not in output


def test_a_stop_is_told_by_rank_0_whatever_time_it_takes(tmp_path):
    code, output = run(tmp_path, *TWO, "run_name=run", "data.num_workers=1", patch=STOP_AT_STEP_3 + SLOW_SUMMARY)
    assert code == 143, output
    assert summary(tmp_path / "outputs/run")["status"] == "stopped"
    assert checkpoint(tmp_path / "outputs/run", 3).is_dir()
    assert output.count("ckpt_path=last continues") == 1
    assert "Traceback" not in output


def test_a_sweep_over_two_processes_is_refused(tmp_path):
    done = forked("-m", *TWO, "seed=1,2", cwd=tmp_path)
    assert done.returncode == 2
    assert "each process would start the whole sweep again" in done.stderr
    assert os.listdir(tmp_path) == []

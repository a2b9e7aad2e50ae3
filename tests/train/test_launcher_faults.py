"""Faults of a run under each launcher: as many in one run as it can survive, since a launch is what takes time.

`test_launchers.py` has the launchers without faults, and what is refused. Faults under Lightning's own launcher are in
`test_ddp.py`. srun is the variables that it sets.
"""

import contextlib
import importlib.util
import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.runs import checkpoint, forked, metrics, summary
from tests.train.test_ddp import finish, run, the_run
from tests.train.test_launchers import WORDS, agent, forked_with_ranks, patched, ranks, srun, start

LONG = [*(word for word in WORDS if not word.startswith("trainer.max_steps")), "trainer.max_steps=4000"]
# Faults by rank and step. `once` is true once in all starts of a run; a process tells its number first.
PATCH = """
import os, resource, signal
import torch
from gpt2_fp8.runtime import rank_watch
from gpt2_fp8.engine.gradients import Gradients
rank_watch.GRACE_SECONDS, rank_watch.LIFE_SECONDS, rank_watch.STUCK_SECONDS = 2.0, 6.0, 8.0
here = dict(rank=0, step=0)

def once(rank, step):
    mark = Path(f"mark-{{rank}}-{{step}}")
    if (here["rank"], here["step"]) != (rank, step) or mark.exists():
        return False
    mark.touch()
    return True

def training_step(self, batch, batch_idx):
    here.update(rank=self.global_rank, step=self.global_step + 1)
    Path(f"process-{{os.getpid()}}").touch()
    time.sleep(0.2)  # signs of life come once a second
    happen()
    original(self, batch, batch_idx)

GPT2Module.training_step = training_step

def happen():
{happen}
"""
# In a run of one process as in a run of two: what is told of step 3's loss is NaN.
NAN = """
of_step, nan = Gradients.of_step, float("nan")
Gradients.of_step = lambda *args: of_step(*args) * (nan if here == dict(rank={rank}, step=3) else 1.0)
"""
# At rank 1's second part of step 2.
NO_MEMORY = """
loss = Gradients.loss

def scarce(self, *args):
    if once(1, 2):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return loss(self, *args)

Gradients.loss = scarce
"""


def faults(*lines):
    return PATCH.format(happen="\n".join(f"    {line}" for line in (*lines, "pass")))


def killed(rank, step, signum="SIGKILL", whom="os.getpid()"):
    return f"if once({rank}, {step}): os.kill({whom}, signal.{signum})"


def ended(process, cwd, timeout=120):
    """`finish`, which also fails where a rank outlives its launcher: each has a session of its own."""
    try:
        return finish(process, timeout)
    finally:
        for mark in Path(cwd).glob("process-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(mark.name.partition("-")[2]), signal.SIGKILL)


def advice(output, cwd):
    """The words by which the run goes on, said once, and naming a run that was given no name."""
    (said,) = re.findall(r"; (\S+ ckpt_path=last) continues$", output, re.MULTILINE)
    assert said == f"run_name={the_run(cwd).name} ckpt_path=last"
    return shlex.split(said)


def assert_like(folder, other):
    """Equal but for rounding; the loss of a step that was left out is NaN in both."""
    table, others = metrics(folder), metrics(other)
    for column in ("train_loss", "val_loss", "lr", "tokens"):
        assert list(table[column]) == list(others[column]), column
        expected = pytest.approx(list(others[column].values()), rel=1e-5, nan_ok=True)
        assert list(table[column].values()) == expected, column


@pytest.fixture(scope="module")
def one_with_nan(tmp_path_factory):
    """A run of one process whose step 3 is left out."""
    cwd = tmp_path_factory.mktemp("one")
    code, output = finish(start(cwd, patched(cwd, faults() + NAN.format(rank=0)), *WORDS, "run_name=run"))
    assert code == 0, output
    return cwd / "outputs/run"


# ---- torchrun ----------------------------------------------------------------------------------------------------


def test_torchrun_out_of_memory_nan_frozen_and_killed(tmp_path, one_with_nan):
    """Two processes of one agent. What they survive alone they survive; for the rest the agent starts them again."""
    patch = faults(killed(1, 7, "SIGSTOP"), killed(0, 11)) + NAN.format(rank=1) + NO_MEMORY
    options = ["--nproc-per-node", "2", "--max-restarts", "2"]
    code, output = ended(agent(tmp_path, options, *WORDS, patch=patch), tmp_path)
    assert code == 0, output
    assert "out of memory: micro_batch_size 1 instead of 2" in output
    assert output.count("step 3: its loss was not finite; the batch is left out") == 1
    assert output.count("rank 1 has shown no life for 6 s; torchrun starts all processes again\n") == 1, output
    assert output.count("rank 1: rank 0 is gone; torchrun starts all processes again\n") == 1, output
    assert output.count("is gone") == output.count("has shown no life") == 1, output
    assert [int(step) for step in re.findall(r"continues  \S+ \(step (\d+)\)", output)] == [5, 10], output
    assert "ckpt_path=last" not in output.partition("completed")[0], "nobody has to type anything"
    assert "Traceback" not in output
    assert_like(the_run(tmp_path), one_with_nan)


def test_an_agent_that_is_killed_leaves_no_rank_behind(tmp_path):
    process = agent(
        tmp_path, ["--nproc-per-node", "2", "--max-restarts", "2"], *LONG,
        patch=faults(killed(0, 6, whom="os.getppid()")),
    )  # fmt: skip
    code, output = ended(process, tmp_path, 60)
    assert code == -signal.SIGKILL
    assert output.count("torchrun's agent (process ") == 1, output
    assert "Traceback" not in output
    report = summary(the_run(tmp_path))
    assert (report["status"], report["exit_code"]) == ("stopped", 143), output
    assert checkpoint(the_run(tmp_path), report["steps"]).is_dir()
    assert not (the_run(tmp_path) / ".lock").exists()
    done = forked(*LONG, *advice(output, tmp_path), f"trainer.max_steps={report['steps'] + 1}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"(step {report['steps']})" in done.stdout


def test_the_agent_of_one_of_two_nodes_is_killed(tmp_path):
    """The first has the store in which the agents meet: without it, the other could not wait for anybody."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two"]
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", *place]
    patch = faults(killed(1, 6, whom="os.getppid()"))
    both = [
        agent(tmp_path, [*options, "--rdzv-conf", conf], *LONG, "run_name=run", patch=patch)
        for conf in ("join_timeout=15,is_host=1", "join_timeout=15,is_host=0")
    ]
    ends = [ended(process, tmp_path) for process in both]
    assert sorted(code for code, _ in ends) == [-signal.SIGKILL, 1], ends
    assert any("RendezvousTimeoutError" in output for _, output in ends), "it may start again, and nobody joins"
    report = summary(tmp_path / "outputs/run")
    assert report["status"] == "stopped", ends
    assert checkpoint(tmp_path / "outputs/run", report["steps"]).is_dir()


def test_a_disk_that_is_full_and_a_stuck_rank(tmp_path):
    """Rank 0 can write no checkpoint for a while: that of step 8 is left out. Then rank 1 hangs."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"
    patch = faults(
        f"if once(0, 7): {limit.format(4096)}",
        f"if once(0, 10): {limit.format('resource.RLIM_INFINITY')}",
        "if once(1, 10): __import__('time').sleep(1000)",
    )
    more = ["callbacks.async_checkpoints=false"]
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    code, output = ended(agent(tmp_path, options, *WORDS, *more, "run_name=run", patch=patch), tmp_path)
    assert code == 0, output
    assert output.count("rank 1 has been stuck in step 10 for 8 s") == 1, output
    assert re.search(r"continues  \S+ \(step 5\)", output), output
    assert "Traceback" not in output
    report = summary(tmp_path / "outputs/run")
    assert (report["status"], report["steps"]) == ("completed", 12)


# ---- the others --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_starts_again_and_is_interrupted(tmp_path):
    """Rank 0 is killed; after that, Ctrl-C reaches accelerate, which passes it on."""
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    options += [f"--main_process_port={free_port()}", "--max_restarts=1"]
    patch = faults(killed(0, 6), killed(1, 12, "SIGINT", "os.getppid()"))
    words = ["-m", "accelerate.commands.launch", *options, patched(tmp_path, patch), *LONG]
    code, output = ended(start(tmp_path, *words, popen=forked_with_ranks), tmp_path)
    assert code == 1, output
    assert output.count("rank 1: rank 0 is gone; accelerate launch starts all processes again\n") == 1, output
    report = summary(the_run(tmp_path))
    assert (report["status"], report["exit_code"]) == ("stopped", 130), output
    assert checkpoint(the_run(tmp_path), report["steps"]).is_dir()
    advice(output, tmp_path)


def test_srun_out_of_memory_nan_killed_and_cancelled(tmp_path, one_with_nan):
    """The run had no name, and what is said works as it is typed. Then a rank gets SIGTERM, and all save."""
    patch = faults(killed(0, 8)) + NAN.format(rank=1) + NO_MEMORY
    ends = ranks(tmp_path, srun(), *WORDS, patch=patch)
    assert [code for code, _ in ends] == [-signal.SIGKILL, 1], ends
    assert "out of memory: micro_batch_size 1 instead of 2" in ends[0][1], ends
    assert ends[0][1].count("step 3: its loss was not finite; the batch is left out") == 1, ends
    words = advice(ends[1][1], tmp_path)
    assert ends[1][1].count("rank 1: rank 0 is gone; ") == 1, ends
    ends = ranks(tmp_path, srun(), *WORDS, *words, patch=faults(killed(1, 9, "SIGTERM")))
    assert [code for code, _ in ends] == [143, 0], "rank 0 says how it goes on"
    assert summary(the_run(tmp_path))["steps"] == 9
    assert advice(ends[0][1], tmp_path) == words
    ends = ranks(tmp_path, srun(), *WORDS, *words, patch=faults())
    assert [code for code, _ in ends] == [0, 0], ends
    assert_like(the_run(tmp_path), one_with_nan)


FULL = "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))"


@pytest.mark.parametrize(
    ("fault", "codes", "said"),
    [
        # Rank 0 has the store in which the ranks meet, and ends with the others.
        (killed(0, 8, "SIGSTOP"), [-signal.SIGKILL, 1], "rank 1: rank 0 has shown no life for 6 s"),
        ("if once(1, 8): __import__('time').sleep(1000)", [1, 1], "rank 1 has been stuck in step 8 for 8 s"),
    ],
    ids=["frozen", "stuck"],
)
def test_srun_a_rank_is_frozen_or_stuck_while_the_disk_is_full(tmp_path, fault, codes, said):
    """Rank 0 cannot write the checkpoint of step 5: a warning, and the next one is not reached."""
    patch = faults(f"if once(0, 4): {FULL}", fault)
    ends = ranks(tmp_path, srun(), *WORDS, "callbacks.async_checkpoints=false", patch=patch)
    assert [code for code, _ in ends] == codes, ends
    output = ends[0][1] + ends[1][1]
    assert output.count(said) == 1, ends
    assert "nothing was saved" in output, ends


def test_lightnings_own_launcher_names_a_run_without_a_name(tmp_path):
    code, output = run(
        tmp_path, *WORDS, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", patch=faults(killed(1, 6)),
        timeout=60,
    )  # fmt: skip
    assert code == 1, output
    assert re.search(r"rank 1 \(process \d+\) was killed by signal 9; run_name=", output), output
    advice(output, tmp_path)

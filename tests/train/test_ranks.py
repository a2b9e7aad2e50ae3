"""Several processes on a CPU, by every launcher: they compute what one does, and end together whatever happens."""

import importlib.util
import os
import re
import signal
import time

import pytest

from tests.ports import free_port
from tests.ranks import BATCH, TWO, WORDS, by_hand, fault, finish, program, run, srun, start, tasks, torchrun
from tests.runs import checkpoint, metrics, summary, train, train_until

AGENT = ["--nproc-per-node", "2"]
COUNT_EXCHANGES = """
import torch
from gpt2_fp8.engine.exchange import Exchange

end = Exchange.end

def counted(self):
    with Path(f"exchanges-{torch.distributed.get_rank()}").open("a") as file:
        file.write("once\\n")
    end(self)

Exchange.end = counted
"""
DATA = """
from gpt2_fp8.config.errors import DataSourceLost
from gpt2_fp8.data.datamodule import Steps
from gpt2_fp8.runtime.collectives import rank_and_world

items = Steps._items
def _items(self):
    for item in items(self):
        if item["cursor"]["step"] == 4 and rank_and_world()[0] == 1:
            raise DataSourceLost("cannot read anything")
        yield item

Steps._items = _items
"""
SLOW_SUMMARY = """
write = Summary.write
def slow_write(self, folder):
    time.sleep(2)
    return write(self, folder)

Summary.write = slow_write
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A run of two processes, without a name; returns the folder it was typed in, and what it printed."""
    cwd = tmp_path_factory.mktemp("two")
    code, output = run(cwd, *TWO, patch=COUNT_EXCHANGES)
    assert code == 0, output
    return cwd, output


def the_run(cwd):
    (folder,) = (cwd / "outputs").iterdir()
    return folder


COLUMNS = ("train_loss", "val_loss", "grad_norm", "lr", "tokens")


def assert_equal_but_for_rounding(folder, other):
    table, others = metrics(folder), metrics(other)
    for column in COLUMNS:
        assert list(table[column]) == list(others[column]), column
        assert list(table[column].values()) == pytest.approx(list(others[column].values()), rel=1e-5), column


def assert_same_numbers(folder, two):
    """Losses and norms to the last digit that is written."""
    table, others = metrics(folder), metrics(the_run(two[0]))
    assert all(table[column] == others[column] for column in COLUMNS)


def test_two_processes_compute_what_one_does_in_one_folder_with_one_exchange_a_step(one, two):
    cwd, output = two
    assert set(os.listdir(cwd)) == {"outputs", "patched.py", "exchanges-0", "exchanges-1"}
    files = {".hydra", "checkpoints", "metrics.csv", "rank_1.log", "run.log", "summary.json", "tensorboard"}
    assert set(os.listdir(the_run(cwd))) == files
    report = summary(the_run(cwd))
    assert (report["status"], report["steps"], report["tokens"]) == ("completed", 12, 12 * 8 * 32)
    assert output.count("precision  fp32 instead of") == 1, "the ranks do not say the same twice"
    assert "Warning" not in output
    assert_equal_but_for_rounding(the_run(cwd), one)
    assert [(cwd / f"exchanges-{rank}").read_text().split() for rank in (0, 1)] == [["once"] * 12] * 2


def test_two_processes_compute_in_fp8_what_one_does(tmp_path):
    """At a low rate: at a high one a run leaves its like exponentially, whatever makes the first bit of difference."""
    fp8 = [
        "precision=fp8_hybrid", "precision.backend=emulated", "recipe=delayed", "trainer.max_steps=20",
        "trainer.val_check_interval=20", "optim.lr=1e-4",
    ]  # fmt: skip
    train(tmp_path / "one", *BATCH, *fp8)
    code, output = run(tmp_path, *TWO, *fp8, "run_name=two")
    assert code == 0, output
    one, two = (metrics(folder)["train_loss"] for folder in (tmp_path / "one", tmp_path / "outputs/two"))
    assert list(two) == list(one) == list(range(1, 21))
    assert list(two.values()) == pytest.approx(list(one.values()), rel=5e-4)


DROPPED = """
import hashlib
import torch

dropout = torch.nn.Dropout.forward

def noted(self, x):
    if not self.training:
        return dropout(self, x)
    kept = dropout(self, torch.ones_like(x)).detach()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with Path(f"dropped-{rank}").open("a") as file:
        file.write(hashlib.sha256(kept.numpy().tobytes()).hexdigest() + "\\n")
    return x * kept

torch.nn.Dropout.forward = noted
"""


def test_each_rank_has_dropout_masks_of_its_own(tmp_path):
    """Those of the first are one process's. A rank that is new in a run that goes on begins with its own."""
    words = ["model.dropout=0.2", "trainer.max_steps=4", "trainer.val_check_interval=4", "run_name=run"]
    masks = {}
    for name, more in (
        ("one", [*WORDS, *words]), ("two", [*TWO, *words]), ("more", [*TWO, *words, "trainer.max_steps=6"])
    ):  # fmt: skip
        cwd = tmp_path / ("one" if name == "more" else name)
        cwd.mkdir(exist_ok=True)
        code, output = run(cwd, *more, *["ckpt_path=last"] * (name == "more"), patch=DROPPED)
        assert code == 0, output
        masks[name] = [path.read_text().split() for path in sorted(cwd.glob("dropped-*"))]
    (alone,), (first, second), (again, new) = masks.values()
    assert len(first) == len(second) == len(alone) // 2
    assert first[: len(first) // 4] == alone[: len(first) // 4], "of the first step"
    assert not set(first) & set(second)
    assert not set(again) & set(new)
    assert not set(new) & set(second)


def test_torchrun_needs_no_key(tmp_path, two):
    code, output = finish(torchrun(tmp_path, AGENT, *WORDS, "trainer=auto", "trainer.accelerator=cpu"))
    assert code == 0, output
    assert "launcher   torchrun: 2 processes\n" in output
    assert_same_numbers(the_run(tmp_path), two)


def test_two_nodes_are_two_agents(tmp_path, two):
    """A rank of the second is killed: both agents start theirs again."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two"]
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", *place]
    patch = fault(1, 7, "SIGKILL")
    both = [torchrun(tmp_path, options, *WORDS, "run_name=run", patch=patch) for _ in range(2)]
    ends = [finish(process, 150) for process in both]
    assert [code for code, _ in ends] == [0, 0], ends
    said = "".join(output for _, output in ends)
    assert "launcher   torchrun: 2 processes on 2 nodes, started again" in said
    assert_equal_but_for_rounding(tmp_path / "outputs/run", the_run(two[0]))


def test_tasks_of_srun_continue_what_one_process_has_begun(tmp_path, one):
    train_until(4, tmp_path / "outputs/run", *BATCH)
    ends = tasks(tmp_path, srun(2), *WORDS, "run_name=run", "ckpt_path=last")
    assert [code for code, _ in ends] == [0, 0], ends
    assert "launcher   srun: 2 processes\n" in ends[0][1]
    assert ends[1][1] == ""
    assert_equal_but_for_rounding(tmp_path / "outputs/run", one)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_is_torchrun_by_another_name(tmp_path, two):
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    options.append(f"--main_process_port={free_port()}")
    words = [*options, *program(tmp_path, "pass"), *WORDS, "run_name=run"]
    code, output = finish(start(tmp_path, "-m", "accelerate.commands.launch", *words))
    assert code == 0, output
    assert "launcher   accelerate launch: 2 processes\n" in output
    assert_same_numbers(tmp_path / "outputs/run", two)


def test_a_mistake_is_said_once_before_torch(tmp_path):
    code, output = run(tmp_path, *TWO, "optim.lr=fast", "no_such_key=1", patch='sys.modules["torch"] = None')
    assert code == 2, output
    assert output.count("error:") == 2, output
    assert all(key in output for key in ("optim.lr", "no_such_key"))
    assert "Traceback" not in output
    assert not (tmp_path / "outputs").exists()


def test_a_rank_whose_main_thread_hangs_ends_when_another_has_failed(tmp_path):
    """As with NCCL, which does not tell it that a rank is gone."""
    patch = fault(1, 9, 'raise RuntimeError("the roof fell in")') + (
        "\nfrom gpt2_fp8.runtime import collectives\nlargest = collectives.largest\n"
        "def hang(value):\n    try:\n        return largest(value)\n    except RuntimeError:\n        time.sleep(600)\n"
        "collectives.largest = hang\n"
    )
    code, output = run(tmp_path, *TWO, "run_name=run", patch=patch)
    assert code == 1, output
    assert "rank 1 failed: RuntimeError: the roof fell in" in summary(tmp_path / "outputs/run")["message"]


def test_a_rank_that_is_killed_is_named_and_the_run_continues_as_if_nothing_was(tmp_path, one):
    code, output = run(tmp_path, *TWO, "run_name=run", patch=fault(1, 7, "SIGKILL"))
    assert code == 1, output
    assert re.search(r"rank 1 \(process \d+\) was killed by SIGKILL", output), output
    assert "Traceback" not in output
    code, output = run(tmp_path, *TWO, "run_name=run", "ckpt_path=last")
    assert code == 0, output
    assert_equal_but_for_rounding(tmp_path / "outputs/run", one)


def test_sigterm_saves_and_is_told_once_whatever_time_it_takes(tmp_path):
    patch = fault(1, 2, "SIGTERM") + SLOW_SUMMARY
    code, output = run(tmp_path, *TWO, "run_name=run", patch=patch)
    assert code == 143, output
    assert summary(tmp_path / "outputs/run")["status"] == "stopped"
    assert checkpoint(tmp_path / "outputs/run", 3).is_dir()
    assert output.count("ckpt_path=last continues") == 1, output
    assert "Traceback" not in output


def test_data_that_one_rank_does_not_get_ends_the_run_saved(tmp_path):
    code, output = run(tmp_path, *TWO, "run_name=run", patch=DATA)
    assert code == 4, output
    report = summary(tmp_path / "outputs/run")
    assert (report["status"], report["steps"]) == ("data_lost", 3)
    assert checkpoint(tmp_path / "outputs/run", 3).is_dir()
    assert "Traceback" not in output


def test_an_agent_that_is_killed_leaves_no_rank_behind(tmp_path):
    patch = fault(0, 3, "os.kill(os.getppid(), signal.SIGKILL)")
    code, output = finish(torchrun(tmp_path, AGENT, *WORDS, "run_name=run", "trainer.max_steps=5000", patch=patch))
    assert code == -signal.SIGKILL
    until = time.monotonic() + 60
    while not (tmp_path / "outputs/run/summary.json").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert summary(tmp_path / "outputs/run")["status"] == "stopped", output


def refused(ends, cause):
    """All ranks have refused, and one of them has said why, once."""
    assert [code for code, _ in ends] == [2] * len(ends), ends
    said = "".join(output for _, output in ends)
    assert said.count("error:") == 1, said
    assert re.search(cause, said), said
    assert "Traceback" not in said


OTHER = """
from gpt2_fp8.train import setup
if os.environ["RANK"] == "1":
    versions = setup._versions
    setup._versions = lambda plan: versions(plan) | {"attention": "other"}
    sys.argv += ["optim.lr=1e-4", "data.train_files=[text-1.txt]"]
"""


def test_ranks_that_differ_are_refused_by_name(tmp_path):
    for rank in range(2):
        (tmp_path / f"text-{rank}.txt").write_text("one line of text\n" * (3000 + rank))
    data = ["data=text_files", "data.tokenizer=bytes", "data.num_workers=0", "data.train_files=[text-0.txt]"]
    ends = tasks(tmp_path, by_hand(), *WORDS, *data, "run_name=run", patch=OTHER)
    assert [code for code, _ in ends] == [2, 2], ends
    said = "".join(output for _, output in ends)
    assert said.count("error:") == 3, said
    for kind, name in (("settings", "optim.lr"), ("versions", "attention"), ("text", "")):
        assert re.search(f"rank 1 has other {kind} than rank 0: .*{name}", said), said


def test_a_step_that_three_processes_cannot_share(tmp_path):
    ends = tasks(tmp_path, by_hand(3), *WORDS, "run_name=run", count=3)
    refused(ends, "a step of 8 sequences does not divide")
    assert not (tmp_path / "outputs").exists()


def test_a_sweep_in_every_process(tmp_path):
    refused(tasks(tmp_path, by_hand(), "-m", *WORDS, "seed=1,2"), "-m in each of 2 processes")


def test_a_rank_that_does_not_come_is_named(tmp_path):
    patch = "from gpt2_fp8.runtime import rendezvous\nrendezvous.PATIENCE_SECONDS = 1.0"
    variables = by_hand()
    words = [*program(tmp_path, patch), *WORDS, "run_name=run"]
    code, output = finish(start(tmp_path, *words, ranks=False, **variables(0)))
    assert code == 1
    assert "in vain for rank 1" in output

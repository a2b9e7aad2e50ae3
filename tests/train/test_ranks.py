"""Several processes on a CPU, by every launcher: they compute what one does, and end together whatever happens."""

import importlib.util
import os
import re
import signal
import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gpt2_fp8.config.errors import Problem, SharedRefusal
from gpt2_fp8.runtime import rendezvous
from gpt2_fp8.runtime.ranks import Ranks
from gpt2_fp8.runtime.rendezvous import Meeting, RankLost
from gpt2_fp8.train.module import GPT2Module
from tests.ports import free_port
from tests.ranks import BATCH, TWO, WORDS, by_hand, fault, finish, program, run, srun, start, tasks, torchrun
from tests.runs import checkpoint, metrics, summary, train, train_until

AGENT = ["--nproc-per-node", "2"]
COUNT_EXCHANGES = """
import logging, warnings
import torch
from gpt2_fp8.engine.exchange import Exchange

end, on_start = Exchange.end, GPT2Module.on_train_start
SAID = "a library warns"

def counted(self):
    with Path(f"exchanges-{torch.distributed.get_rank()}").open("a") as file:
        file.write("once\\n")
    end(self)

def on_train_start(self):
    on_start(self)
    warnings.warn(SAID)
    logging.getLogger("library").warning(SAID)
    if self.trainer.strategy.model is not self:
        Path("wrapped").touch()

Exchange.end, GPT2Module.on_train_start = counted, on_train_start
"""
DATA = """
from gpt2_fp8.config.errors import DataSourceLost
from gpt2_fp8.data.datamodule import Steps
from gpt2_fp8.runtime.collectives import rank_and_world

items = Steps.__iter__
def __iter__(self):
    for item in items(self):
        if item["cursor"]["step"] == 4 and rank_and_world()[0] == 1:
            raise DataSourceLost("cannot read anything")
        yield item

Steps.__iter__ = __iter__
"""
REFUSED_AGAIN = """
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.train.fit import Training
prepare = Training.prepare

def refuse_or_prepare(self):
    if Path("happened").exists():
        raise UserError.of("not so")
    prepare(self)

Training.prepare = refuse_or_prepare
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
    output = run(cwd, *TWO, patch=COUNT_EXCHANGES)
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


# ---- numbers -----------------------------------------------------------------------------------------------------


def test_one_folder_and_one_summary_of_two_processes(two):
    cwd, output = two
    assert set(os.listdir(cwd)) == {"outputs", "patched.py", "exchanges-0", "exchanges-1"}
    files = {".hydra", "checkpoints", "metrics.csv", "rank_1.log", "run.log", "summary.json", "tensorboard"}
    assert set(os.listdir(the_run(cwd))) == files
    report = summary(the_run(cwd))
    assert (report["status"], report["steps"], report["tokens"]) == ("completed", 12, 12 * 8 * 32)
    assert output.count("precision  fp32 instead of") == 1, "the ranks do not say the same twice"
    assert (output.count("Warning"), output.count("a library warns")) == (1, 2), "rank 0 alone"
    assert (the_run(cwd) / "rank_1.log").read_text().count("a library warns") == 2


def test_two_processes_compute_what_one_does_with_one_exchange_a_step(one, two):
    assert_equal_but_for_rounding(the_run(two[0]), one)
    for rank in (0, 1):
        assert (two[0] / f"exchanges-{rank}").read_text().split() == ["once"] * 12
    assert not (two[0] / "wrapped").exists(), "DistributedDataParallel holds a copy of the gradients"


TOKENS = """
from pathlib import Path
from gpt2_fp8.train.module import GPT2Module

step = GPT2Module.training_step

def noted(self, batch, batch_idx):
    with Path(f"tokens-{self.global_rank}").open("ab") as file:
        file.write(batch["ids"].numpy().tobytes())
    return step(self, batch, batch_idx)

GPT2Module.training_step = noted
"""
# A low rate: at a high one a run leaves its like exponentially, whatever makes the first bit of difference.
FIFTY = [
    "trainer.max_steps=50", "trainer.val_check_interval=25", "callbacks.checkpoint_every_n_steps=10", "optim.lr=1e-4",
    "callbacks.sample_tokens=4", "logger.histograms_every_n_steps=10", "callbacks.fp8_health_every_n_steps=10",
]  # fmt: skip
EMULATED = ["precision=fp8_hybrid", "precision.backend=emulated"]
PAGE = [f"data.validation.page.files={Path(__file__).parents[2]}/docs/data.md", "data.validation.page.sequences=5"]
KINDS = {
    "fp32": ["precision=fp32", "optimizer=muon", *PAGE],
    "delayed": [*EMULATED, "recipe=delayed", "precision.bf16_last_steps=5"],
    "current": [*EMULATED, "recipe=current", "optimizer=adamw_bf16"],
}


@pytest.mark.parametrize("kind", [pytest.param(n, marks=[pytest.mark.slow] * (n == "current")) for n in KINDS])
def test_fifty_steps_of_two_processes_are_those_of_one(tmp_path, monkeypatch, kind):
    """With every optimizer, and with all that rank 0 does alone. Weights that differ between ranks end a run."""
    words = [*FIFTY, *KINDS[kind]]
    buckets = "\nfrom gpt2_fp8.engine import exchange\nexchange.BUCKET_BYTES = 1 << 14\n"  # several
    output = run(tmp_path, *TWO, *words, "run_name=run", patch=TOKENS + buckets)
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    monkeypatch.setattr(GPT2Module, "training_step", GPT2Module.training_step)  # to be put back
    exec(TOKENS, {})
    train(tmp_path / "alone/one", *BATCH, *words)
    places = tmp_path / "tokens-0", tmp_path / "tokens-1", tmp_path / "alone/tokens-0"
    first, second, alone = (np.frombuffer(place.read_bytes(), np.int32).reshape(50, -1, 33) for place in places)
    assert np.array_equal(np.stack([first, second], axis=2).reshape(alone.shape), alone)
    folders = tmp_path / "outputs/run", tmp_path / "alone/one"
    own, theirs = (metrics(folder) for folder in folders)
    assert own.keys() == theirs.keys()
    for column in ("train_loss", "val_loss", *(["val_loss/page"] if kind == "fp32" else [])):
        assert own[column] == pytest.approx(theirs[column], rel=1e-5 if kind == "fp32" else 5e-4), column
    assert own["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    assert "sample at step 50: " in output
    assert "sync_dist" not in output
    curves = ["".join(map(str, folder.glob("tensorboard/events.*"))) for folder in folders]
    histograms = [Path(curve).read_bytes().count(b"tensors_weights/") for curve in curves]
    health = [(folder / "fp8.csv").read_text().count("\n") for folder in folders] if kind != "fp32" else [1, 1]
    assert histograms[0] == histograms[1] > 0
    assert health[0] == health[1] > 0


DRIFT = """
import torch

def training_step(self, batch, batch_idx):
    if (self.global_rank, self.global_step) == (1, int(os.environ["DRIFTS"])):
        self.model.positions.weight.data.view(torch.int32)[3, 5] ^= 1 << 9
    original(self, batch, batch_idx)

GPT2Module.training_step = training_step
"""


def test_a_rank_that_drifts_is_named_and_what_it_has_trained_is_not_saved(tmp_path):
    """In a validation, and at a checkpoint."""
    saved = tmp_path / "outputs/run/checkpoints"
    for words, at, seen, last in (([], 4, 5, 4), (["ckpt_path=last", "trainer.val_check_interval=12"], 6, 8, 4)):
        output = run(tmp_path, *TWO, *words, "run_name=run", patch=DRIFT, code=1, DRIFTS=str(at))
        told = re.findall(rf"the weights of rank 1 \(on .+\) differ from those of rank 0 after step {seen}", output)
        assert len(told) == 1, output
        assert "Traceback" not in output
        assert summary(tmp_path / "outputs/run")["status"] == "failed"
        assert "val_loss" not in metrics(tmp_path / "outputs/run"), "before the validation"
        assert max(saved.glob("step-*")).name == f"step-{last:08d}"


DROPPED = """
import hashlib, os
from pathlib import Path
import torch

dropout = torch.nn.Dropout.forward

def noted(self, x):
    if not self.training:
        return dropout(self, x)
    kept = dropout(self, torch.ones_like(x)).detach()
    with Path(f"dropped-{os.environ.get('RANK', 0)}").open("a") as file:
        file.write(hashlib.sha256(kept.numpy().tobytes()).hexdigest() + "\\n")
    return x * kept

torch.nn.Dropout.forward = noted
"""


def dropped(cwd, rank):
    """The digests of a rank's dropout masks, in the order in which they were drawn."""
    return (cwd / f"dropped-{rank}").read_text().split()


def test_each_rank_has_dropout_masks_of_its_own(tmp_path, monkeypatch):
    """Those of the first are one process's. A rank that is new in a run that goes on begins with its own."""
    words = ["model.dropout=0.2", "trainer.max_steps=4", "trainer.val_check_interval=4"]
    for name in ("two", "more"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "more")
    monkeypatch.setattr(torch.nn.Dropout, "forward", torch.nn.Dropout.forward)  # to be put back
    exec(DROPPED, {})
    train(tmp_path / "more/outputs/run", *BATCH, *words)
    alone = dropped(tmp_path / "more", 0)
    run(tmp_path / "two", *TWO, *words, "run_name=run", patch=DROPPED)
    first, second = (dropped(tmp_path / "two", rank) for rank in (0, 1))
    assert len(first) == len(second) == len(alone) // 2
    a_step = len(first) // 4
    assert first[:a_step] == alone[:a_step]
    assert not set(first) & set(second)
    longer = [*words, "trainer.max_steps=6", "run_name=run", "ckpt_path=last"]
    run(tmp_path / "more", *TWO, *longer, patch=DROPPED)
    assert not set(dropped(tmp_path / "more", 0)) & set(dropped(tmp_path / "more", 1)), "after step 4"
    assert not set(dropped(tmp_path / "more", 1)) & set(second)


def test_a_sweep_of_jobs_of_two_processes(tmp_path, two):
    few = ["trainer.max_steps=2", "trainer.val_check_interval=2"]
    run(tmp_path, "-m", *TWO, *few, "seed=1,2", "run_name=sweep", "hydra.sweep.dir=sweep", timeout=180)
    folders = sorted(path.parent for path in (tmp_path / "sweep").glob("*/summary.json"))
    assert [summary(folder)["config"]["seed"] for folder in folders] == [1, 2]
    assert {summary(folder)["status"] for folder in folders} == {"completed"}


# ---- launchers ---------------------------------------------------------------------------------------------------


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
    assert "launcher   torchrun: 2 processes on 2 nodes, started again" in "".join(output for _, output in ends)
    assert_equal_but_for_rounding(tmp_path / "outputs/run", the_run(two[0]))


def test_tasks_of_srun_continue_what_one_process_has_begun(tmp_path, one):
    train_until(4, tmp_path / "outputs/run", *BATCH)
    ends = tasks(tmp_path, srun(2), *WORDS, "run_name=run", "ckpt_path=last")
    assert [code for code, _ in ends] == [0, 0], ends
    assert "launcher   srun: 2 processes\n" in ends[0][1]
    assert ends[1][1] == ""
    assert_equal_but_for_rounding(tmp_path / "outputs/run", one)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_is_torchrun_by_another_name(tmp_path, two):
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    options.append(f"--main_process_port={free_port()}")
    words = [*options, *program(tmp_path, "pass"), *WORDS, "run_name=run"]
    code, output = finish(start(tmp_path, "-m", "accelerate.commands.launch", *words))
    assert code == 0, output
    assert "launcher   accelerate launch: 2 processes\n" in output
    assert_same_numbers(tmp_path / "outputs/run", two)


# ---- ends --------------------------------------------------------------------------------------------------------


def test_a_mistake_is_said_once_before_torch(tmp_path):
    output = run(tmp_path, *TWO, "optim.lr=fast", "no_such_key=1", patch='sys.modules["torch"] = None', code=2)
    assert output.count("error:") == 2, output
    assert all(key in output for key in ("optim.lr", "no_such_key"))
    assert "Traceback" not in output
    assert not (tmp_path / "outputs").exists()


def test_a_rank_whose_main_thread_hangs_ends_when_another_has_failed(tmp_path):
    """As with NCCL, which does not tell it that a rank is gone."""
    patch = fault(1, 9, 'raise RuntimeError("the roof fell in")') + (
        "\nfrom gpt2_fp8.runtime import collectives, rendezvous\n"
        "largest, rendezvous.GRACE_SECONDS = collectives.largest, 1.0\n"
        "def hang(value):\n    try:\n        return largest(value)\n    except RuntimeError:\n        time.sleep(600)\n"
        "collectives.largest = hang\n"
    )
    run(tmp_path, *TWO, "run_name=run", patch=patch, code=1)
    assert "rank 1 failed: RuntimeError: the roof fell in" in summary(tmp_path / "outputs/run")["message"]


def test_a_rank_that_fails_alone_ends_though_its_store_is_gone(monkeypatch):
    """As with the agent of another node. In a torn connection the thread watches until the rank knows its error."""
    met, exits = object.__new__(Meeting), []
    met.ranks, met._ending, met.apart, met._lost = Ranks(rank=0, world_size=2), Event(), None, None
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(met, "_torn", lambda error: RankLost(f"{error}, {met._ending.is_set()}"))
    assert str(met.explain(torch.distributed.DistNetworkError("torn"))).startswith("torn, False")
    gone = SimpleNamespace(check=Mock(side_effect=torch.distributed.DistNetworkError("gone")))
    met._watch(gone, lambda error: None)
    assert exits == [RankLost.exit_code]


def test_what_all_ranks_refuse_is_said_by_another_where_rank_zero_hangs(monkeypatch, capsys):
    met, refused = object.__new__(Meeting), SharedRefusal([Problem("no memory")])
    met.ranks, met._store = Ranks(rank=1, world_size=2), torch.distributed.HashStore()
    monkeypatch.setattr(rendezvous, "END_SECONDS", 0.1)
    met.end_after_rank_zero(refused, str(refused))
    assert capsys.readouterr().err == "rank 1: error: no memory\n"
    met._store.set("said", "rank 1 refused: error: no memory")
    met.end_after_rank_zero(refused, str(refused))
    assert capsys.readouterr().err == ""


def test_a_rank_that_is_killed_is_named_and_the_run_continues_as_if_nothing_was(tmp_path, one):
    """Rank 0, which writes the summary, as NCCL's watchdog kills one that waits in vain."""
    began = time.monotonic()
    output = run(tmp_path, *TWO, "run_name=run", patch=fault(0, 7, "SIGABRT"), code=1)
    assert time.monotonic() - began < 60
    named = r"rank 0 \(process \d+\) was killed by SIGABRT"
    assert re.search(named, output), output
    assert re.search(named, summary(tmp_path / "outputs/run")["message"])
    assert "Traceback" not in output
    run(tmp_path, *TWO, "run_name=run", "ckpt_path=last")
    assert_equal_but_for_rounding(tmp_path / "outputs/run", one)


def test_a_run_with_restarts_completes_as_if_no_rank_had_been_killed(tmp_path, two):
    output = run(tmp_path, *TWO, "trainer.max_restarts=1", patch=fault(1, 7, "SIGKILL"))
    assert "launcher   torch's agent: 2 processes, started again\n" in output
    assert_same_numbers(the_run(tmp_path), two)


def test_one_process_is_started_again_after_a_fault_and_not_after_a_refusal(tmp_path):
    output = run(tmp_path, *WORDS, "trainer.max_restarts=3", patch=fault(0, 3, "SIGKILL") + REFUSED_AGAIN, code=2)
    assert "rank 0" in output
    assert output.count("all are started again") == output.count("not so") == 1, output


def test_a_rank_that_hangs_is_named(tmp_path):
    hurry = (
        "\nfrom datetime import timedelta\nfrom torch.distributed.elastic.multiprocessing import PContext\n"
        "from gpt2_fp8.runtime import collectives, rendezvous\n"
        "collectives.GROUP_TIMEOUT = timedelta(seconds=3)\nrendezvous.GRACE_SECONDS = 1.0\n"
        "PContext.close.__defaults__ = (None, 3)\n"
    )
    output = run(tmp_path, *TWO, "run_name=run", patch=fault(1, 7, "SIGSTOP") + hurry, code=1)
    report = summary(tmp_path / "outputs/run")
    assert (report["status"], report["steps"]) == ("failed", 7)
    assert output.count("rank 1 hangs") == 1, output
    assert "rank 1 hangs" in report["message"]
    assert "Traceback" not in output


def test_sigterm_saves_and_is_told_once_whatever_time_it_takes(tmp_path):
    patch = fault(1, 2, "SIGTERM") + SLOW_SUMMARY
    output = run(tmp_path, *TWO, "run_name=run", "trainer.max_restarts=1", patch=patch, code=143)
    assert summary(tmp_path / "outputs/run")["status"] == "stopped"
    assert checkpoint(tmp_path / "outputs/run", 3).is_dir()
    assert output.count("ckpt_path=last continues") == 1, output
    assert "Traceback" not in output


def test_data_that_one_rank_does_not_get_ends_the_run_saved(tmp_path):
    output = run(tmp_path, *TWO, "run_name=run", patch=DATA, code=4)
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


# ---- ranks that do not fit together ------------------------------------------------------------------------------


OTHER = """
from gpt2_fp8.train import fit
if os.environ["RANK"] == "1":
    versions = fit._versions
    fit._versions = lambda plan: versions(plan) | {"attention": "other"}
    sys.argv += ["optim.lr=1e-4", "data.train_files=[../text-1.txt]"]
    os.chdir("node-1")
"""
ONE_GPU = """
from gpt2_fp8.runtime import rendezvous
from gpt2_fp8.train.fit import Training
prepare = Training.prepare

def claim_and_prepare(self):
    time.sleep(os.environ["RANK"] == "0")  # it hosts the store, and is the one that is refused
    rendezvous.get_meeting().claim("GPU-0")
    prepare(self)

Training.prepare = claim_and_prepare
"""


def test_ranks_that_differ_are_refused_by_name(tmp_path):
    for rank in range(2):
        (tmp_path / f"text-{rank}.txt").write_text("one line of text\n" * (3000 + rank))
    (tmp_path / "node-1").mkdir()
    data = ["data=text_files", "data.tokenizer=bytes", "data.num_workers=0", "data.train_files=[text-0.txt]"]
    ends = tasks(tmp_path, by_hand(), *WORDS, *data, "run_name=run", patch=OTHER)
    assert [code for code, _ in ends] == [2, 2], ends
    said = "".join(output for _, output in ends)
    assert said.count("error:") == 4, said
    for kind, name in (("settings", "optim.lr"), ("versions", "attention"), ("text", "")):
        assert re.search(f"rank 1 has other {kind} than rank 0: .*{name}", said), said
    assert "rank 1 does not see the run's folder of rank 0" in said


REFUSED = [
    (3, [], "", "a step of 8 sequences does not divide"), (2, [], ONE_GPU, "the ranks . and . are on one GPU"),
    (2, ["-m", "seed=1,2"], "", "-m in each of 2 processes"),
]  # fmt: skip


@pytest.mark.parametrize(("count", "words", "patch", "cause"), REFUSED)
def test_ranks_that_do_not_fit_refuse_and_one_says_why(tmp_path, count, words, patch, cause):
    ends = tasks(tmp_path, by_hand(count), *WORDS, *words, patch=patch, count=count)
    assert [code for code, _ in ends] == [2] * count, ends
    said = "".join(output for _, output in ends)
    assert said.count("error:") == 1, said
    assert re.search(cause, said), said
    assert "Traceback" not in said
    assert patch or not (tmp_path / "outputs").exists()


def test_a_rank_that_does_not_come_is_named(tmp_path):
    patch = "from gpt2_fp8.runtime import rendezvous\nrendezvous.PATIENCE_SECONDS = 1.0"
    variables = by_hand()
    words = [*program(tmp_path, patch), *WORDS, "run_name=run"]
    code, output = finish(start(tmp_path, *words, ranks=False, **variables(0)))
    assert code == 1
    assert "in vain for rank 1" in output

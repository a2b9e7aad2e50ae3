"""Whole runs: what they leave behind, and that a run continued is the run uninterrupted."""

import gzip
import json
import logging
import re
import shlex

import pytest
import torch

from gpt2_fp8.checkpoint.files import read, read_weights
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.train.module import GPT2Module
from tests.runs import SMALL, checkpoint, forked, metrics, record_steps, summary, train, train_until


def test_a_run_leaves_everything_in_its_folder(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "run"
    loss = train(folder, "callbacks.sample_tokens=5")
    report = summary(folder)
    assert (report["status"], report["exit_code"], report["steps"]) == ("completed", 0, 12)
    assert (report["tokens"], report["last_val_loss"]) == (12 * 8 * 32, pytest.approx(loss))
    assert report["best_val_loss"] <= report["last_val_loss"]
    assert (report["precision"]["asked"], report["precision"]["ran"]) == ("fp8_hybrid", "fp32")
    assert "CPU" in report["precision"]["reason"]
    assert report["tokens_per_second"] > 0
    assert report["checkpoint"]["last"] == str(checkpoint(folder, 12))
    assert report["data"]["documents"]["read"] > 0
    table = metrics(folder)
    assert list(table["train_loss"]) == list(range(1, 13))
    assert table["train_loss"][12] < table["train_loss"][1]
    assert list(table["val_loss"]) == [5, 10, 12]  # by the interval, and at the end
    assert set(table) >= {"lr", "grad_norm", "clip_ratio", "tokens_per_second", "step_time", "data_wait", "tokens"}
    assert "mfu_bf16" not in table  # nobody knows a CPU's
    memory = list(table["memory_gb"].values())
    assert memory == sorted(memory), "a peak so far"
    assert 0.1 < memory[0] <= memory[-1] <= report["peak_memory_gb"] < 100
    assert f"{memory[-1]:5.1f} GiB" in caplog.text
    assert list(folder.glob("tensorboard/events.out.*"))
    assert "instead of fp8_hybrid" in caplog.text
    assert "sample at step 12" in caplog.text


@pytest.mark.parametrize(("steps", "recorded"), [(12, 5), (1, 1)])
def test_a_profile_is_written_and_changes_no_number(tmp_path, caplog, steps, recorded):
    caplog.set_level(logging.INFO)
    words = [f"trainer.max_steps={steps}", "trainer.val_check_interval=12", "optim.warmup_steps=0"]
    loss = train(tmp_path / "profiled", *words, "trainer.profiler=pytorch")
    table = (tmp_path / "profiled/profile.txt").read_text()
    counts = {line.split()[0]: int(line.split()[-1]) for line in table.splitlines() if re.search(r"%.* \d+ *$", line)}
    assert (counts["ProfilerStep*"], counts["aten::addmm"]) == (recorded, recorded * 2 * 4), "two micro-batches"
    trace = json.loads(gzip.decompress((tmp_path / "profiled/trace.json.gz").read_bytes()))
    assert "aten::addmm" in {event.get("name") for event in trace["traceEvents"]}
    assert sum(record.message.startswith("profile ") for record in caplog.records) == 11
    if steps == 12:
        assert loss == train(tmp_path / "hooks", *words, "trainer.profiler=simple")
        assert "run_training_batch" in next((tmp_path / "hooks").glob("*profile*.txt")).read_text()
        train(tmp_path / "plain", *words)
        assert metrics(tmp_path / "plain")["train_loss"] == metrics(tmp_path / "profiled")["train_loss"]


def test_init_from_takes_weights_alone(tmp_path, monkeypatch):
    train(tmp_path / "first")
    steps = record_steps(monkeypatch)
    weights = read_weights(checkpoint(tmp_path / "first", 12))
    train(tmp_path / "second", f"init_from={checkpoint(tmp_path / 'first', 12)}", "optim.lr=1e-12", "seed=7")
    assert [step for step, *_ in steps] == list(range(1, 13))
    after = read_weights(checkpoint(tmp_path / "second", 12))
    for name, tensor in weights.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-9)


def proposed(output):
    (line,) = (line for line in output.splitlines() if "next: python -m gpt2_fp8.run " in line)
    return shlex.split(line.partition("gpt2_fp8.run ")[2])


def test_the_command_that_goes_on_keeps_the_rates_of_the_end(tmp_path):
    done = forked(*SMALL, "optimizer=muon", "optimizer.matrix_lr=0.02", "run_name=run", cwd=tmp_path)
    first = rates(checkpoint(tmp_path / "outputs/run", 12))
    again = forked(*proposed(done.stdout), cwd=tmp_path, code=0)
    assert "learning rate" not in again.stdout + again.stderr
    assert summary(tmp_path / "outputs/run")["steps"] == 24
    assert rates(checkpoint(tmp_path / "outputs/run", 24)) == pytest.approx(first, rel=1e-5)
    logged = metrics(tmp_path / "outputs/run")["lr"]
    assert [logged[step] for step in range(13, 25)] == pytest.approx([first[0]] * 12, rel=1e-5)
    assert "trainer.max_steps=48" in proposed(again.stdout)


def rates(path):
    return [group["lr"] for group in read(path)["optimizer_states"][0]["param_groups"]]


def test_a_decay_branches_off_a_stable_phase(tmp_path, caplog):
    stable = ["optim.schedule=constant", "optim.min_lr_ratio=1"]
    decay = ["optim.schedule=warmup_stable_decay", "optim.decay_steps=4", "optim.min_lr_ratio=0.1"]
    train(tmp_path / "stable", *stable, "callbacks.keep_every_n_steps=8")
    train(tmp_path / "branch", *decay, f"ckpt_path={checkpoint(tmp_path / 'stable', 8)}")
    kept, falling = metrics(tmp_path / "stable")["lr"], metrics(tmp_path / "branch")["lr"]
    assert list(falling) == [9, 10, 11, 12]
    assert falling[9] == kept[8] > falling[10] > falling[11] > falling[12]
    assert not [message for message in caplog.messages if "learning rate" in message]


def test_a_refused_resume_leaves_the_summary_as_it_was(tmp_path):
    train(tmp_path / "run")
    before = summary(tmp_path / "run")
    for override in ("data.seed=9", "trainer.max_steps=8"):
        with pytest.raises(UserError):
            train(tmp_path / "run", "ckpt_path=last", override)
    train(tmp_path / "other")
    with pytest.raises(UserError, match="is of another run"):
        train(tmp_path / "run", f"ckpt_path={checkpoint(tmp_path / 'other', 12)}")
    assert summary(tmp_path / "run") == before


def test_a_run_without_a_sound_checkpoint_goes_back_to_its_start(tmp_path, monkeypatch):
    steps = record_steps(monkeypatch)
    original, spoiled = GPT2Module.manual_backward, []

    def manual_backward(self, loss, *args, **kwargs):
        if 2 <= self.trainer.global_step < 4 and len(spoiled) < 4:  # two micro-batches in each of two steps, once
            spoiled.append(self.trainer.global_step)
            loss = loss * float("nan")
        original(self, loss, *args, **kwargs)

    monkeypatch.setattr(GPT2Module, "manual_backward", manual_backward)
    train(tmp_path / "run", "callbacks.nonfinite_limit=2", "callbacks.checkpoint_every_n_steps=100")
    assert [step for step, *_ in steps] == [*range(1, 5), *range(1, 13)]
    assert steps[:2] == steps[4:6], "the same text and the same weights"
    assert summary(tmp_path / "run")["divergence"]["rollbacks"] == 1
    assert list(metrics(tmp_path / "run")["train_loss"]) == list(range(1, 13))


def test_overfit_repeats_the_first_batch(tmp_path, monkeypatch):
    steps = record_steps(monkeypatch)
    train(tmp_path / "run", "debug=overfit", "optim.lr=0.01")
    assert len({tokens for _, tokens, _ in steps}) == 1
    losses = [float.fromhex(loss) for *_, loss in steps]
    assert losses[-1] < losses[0] - 1


def test_fast_dev_run_takes_one_step_and_writes_only_the_summary(tmp_path, monkeypatch):
    steps = record_steps(monkeypatch)
    train(tmp_path / "run", "debug=fdr")
    assert len(steps) == 1
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["summary.json"]
    assert summary(tmp_path / "run")["status"] == "completed"


def test_a_validation_before_a_resume_stays_the_last_one(tmp_path):
    train_until(7, tmp_path / "run")
    train_until(9, tmp_path / "run", "ckpt_path=last")
    assert summary(tmp_path / "run")["last_val_loss"] == metrics(tmp_path / "run")["val_loss"][5]


def test_no_validation_where_none_is_wanted(tmp_path):
    assert train(tmp_path / "run", "data.val_sequences=0") is None
    assert "val_loss" not in metrics(tmp_path / "run")
    assert summary(tmp_path / "run")["last_val_loss"] is None

"""Whole runs: what they leave behind, and that a run continued is the run uninterrupted."""

import json
import logging
import shlex
import weakref
from dataclasses import replace

import pytest
import torch

from gpt2_fp8.callbacks.samples import Samples
from gpt2_fp8.checkpoint.files import read, read_weights
from gpt2_fp8.config.errors import Diverged, UserError
from gpt2_fp8.train import setup
from gpt2_fp8.train.module import GPT2Module
from tests.common import OPTIM
from tests.runs import (
    SMALL,
    assert_same_checkpoint,
    checkpoint,
    forked,
    metrics,
    record_steps,
    summary,
    train,
    train_until,
)


def test_a_run_leaves_everything_in_its_folder(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "run"
    loss = train(folder, "callbacks.sample_tokens=5")
    report = summary(folder)
    assert report["status"] == "completed"
    assert report["exit_code"] == 0
    assert report["steps"] == 12
    assert report["tokens"] == 12 * 8 * 32
    assert report["last_val_loss"] == pytest.approx(loss)
    assert report["best_val_loss"] <= report["last_val_loss"]
    assert report["precision"]["asked"] == "fp8_hybrid"
    assert report["precision"]["ran"] == "fp32"
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


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.num_workers=2"],
        ["micro_batch_size=1"],
        ["model.dropout=0.2"],
        ["precision=bf16", "micro_batch_size=8"],
    ],
    ids=["plain", "two workers", "accumulation of 8", "dropout", "bf16"],
)
def test_three_legs_equal_one_run_bit_for_bit(tmp_path, monkeypatch, overrides):
    steps = record_steps(monkeypatch)
    train(tmp_path / "whole", *overrides)
    whole = list(steps)
    steps.clear()
    train_until(4, tmp_path / "legs", *overrides)
    train_until(8, tmp_path / "legs", *overrides, "ckpt_path=last")
    train(tmp_path / "legs", *overrides, "ckpt_path=last")
    assert steps == whole
    assert len(whole) == 12
    assert_same_checkpoint(checkpoint(tmp_path / "whole", 12), checkpoint(tmp_path / "legs", 12))
    table = metrics(tmp_path / "legs")
    assert table["train_loss"] == metrics(tmp_path / "whole")["train_loss"]
    assert table["val_loss"] == metrics(tmp_path / "whole")["val_loss"]


def test_workers_and_micro_batch_may_change_at_a_resume(tmp_path, monkeypatch):
    steps = record_steps(monkeypatch)
    train(tmp_path / "whole")
    whole = list(steps)
    steps.clear()
    train_until(4, tmp_path / "legs")
    train(tmp_path / "legs", "ckpt_path=last", "data.num_workers=2", "micro_batch_size=2")
    assert [tokens for _, tokens, _ in steps] == [tokens for _, tokens, _ in whole]
    losses = [[float.fromhex(loss) for *_, loss in run] for run in (steps, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("first", "second"), [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp8_hybrid")])
def test_a_checkpoint_continues_in_another_precision(tmp_path, first, second):
    train_until(4, tmp_path / "run", f"precision={first}")
    train(tmp_path / "run", f"precision={second}", "ckpt_path=last")
    losses = metrics(tmp_path / "run")["train_loss"]
    assert list(losses) == list(range(1, 13))
    assert abs(losses[5] - losses[4]) < 2 * max(abs(losses[i + 1] - losses[i]) for i in range(1, 4))


def test_init_from_takes_weights_alone(tmp_path, monkeypatch):
    train(tmp_path / "first")
    steps = record_steps(monkeypatch)
    weights = read_weights(checkpoint(tmp_path / "first", 12))
    train(tmp_path / "second", f"init_from={checkpoint(tmp_path / 'first', 12)}", "optim.lr=1e-12", "seed=7")
    assert [step for step, *_ in steps] == list(range(1, 13))
    after = read_weights(checkpoint(tmp_path / "second", 12))
    for name, tensor in weights.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-9)


def test_the_command_line_governs_the_optimizer_of_a_resumed_run(tmp_path):
    train_until(4, tmp_path / "run")
    train(tmp_path / "run", "ckpt_path=last", "optim.lr=0.01", "trainer.max_steps=16")
    from gpt2_fp8.engine.schedule import learning_rate_factor

    rates = metrics(tmp_path / "run")["lr"]
    assert rates[6] == pytest.approx(
        0.01 * learning_rate_factor(5, replace(OPTIM, warmup_steps=2), 16)
    )  # steps from 1, the schedule from 0


def proposed(output):
    """The words of the command with which a run says that it goes on."""
    (line,) = (line for line in output.splitlines() if "next: python -m gpt2_fp8.run " in line)
    return shlex.split(line.partition("gpt2_fp8.run ")[2])


@pytest.mark.parametrize(
    "words",
    [
        [],
        pytest.param(["optim.schedule=warmup_stable_decay", "optim.decay_steps=4"], marks=pytest.mark.slow),
        ["optimizer=muon", "optimizer.matrix_lr=0.02"],
        pytest.param(["optim.schedule=constant", "optim.min_lr_ratio=1"], marks=pytest.mark.slow),
    ],
    ids=["cosine", "stable", "muon", "constant"],
)
def test_the_command_that_goes_on_keeps_the_rate_of_the_end(tmp_path, words):
    done = forked(*SMALL, *words, "run_name=run", cwd=tmp_path)
    first = rates(checkpoint(tmp_path / "outputs/run", 12))
    again = forked(*proposed(done.stdout), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "learning rate" not in again.stdout + again.stderr
    assert summary(tmp_path / "outputs/run")["steps"] == 24
    assert rates(checkpoint(tmp_path / "outputs/run", 24)) == pytest.approx(first, rel=1e-5)
    logged = metrics(tmp_path / "outputs/run")["lr"]
    assert [logged[step] for step in range(13, 25)] == pytest.approx([first[0]] * 12, rel=1e-5)
    assert "trainer.max_steps=48" in proposed(again.stdout)


def rates(path):
    """The learning rates of the step after a checkpoint, by parameter group."""
    return [group["lr"] for group in read(path)["optimizer_states"][0]["param_groups"]]


def test_a_rate_that_jumps_at_a_resume_is_said(tmp_path, caplog):
    train(tmp_path / "run")
    (before,) = set(rates(checkpoint(tmp_path / "run", 12)))
    train(tmp_path / "run", "ckpt_path=last", "trainer.max_steps=24")
    logged = metrics(tmp_path / "run")["lr"]
    assert logged[13] > 2 * logged[12]
    both = [f"{rate:.1e}" for rate in (before, logged[13])]
    (said,) = (message for message in caplog.messages if all(rate in message for rate in both))
    assert "step 13" in said


def test_a_resume_on_the_same_schedule_says_nothing_of_the_rate(tmp_path, caplog):
    train_until(8, tmp_path / "run")
    train(tmp_path / "run", "ckpt_path=last")
    assert not [message for message in caplog.messages if "learning rate" in message]


def test_a_decay_branches_off_a_stable_phase(tmp_path, caplog):
    stable = ["optim.schedule=constant", "optim.min_lr_ratio=1"]
    decay = ["optim.schedule=warmup_stable_decay", "optim.decay_steps=4", "optim.min_lr_ratio=0.1"]
    train(tmp_path / "stable", *stable, "callbacks.keep_every_n_steps=8")
    train(tmp_path / "branch", *decay, f"ckpt_path={checkpoint(tmp_path / 'stable', 8)}")
    kept, falling = metrics(tmp_path / "stable")["lr"], metrics(tmp_path / "branch")["lr"]
    assert list(falling) == [9, 10, 11, 12]
    assert falling[9] == kept[8] > falling[10] > falling[11] > falling[12]
    assert not [message for message in caplog.messages if "learning rate" in message]


def test_resuming_a_finished_run_is_done_at_once(tmp_path, monkeypatch):
    train(tmp_path / "run")
    steps = record_steps(monkeypatch)
    before = summary(tmp_path / "run")
    train(tmp_path / "run", "ckpt_path=last")
    assert steps == []
    kept = ("status", "steps", "tokens_per_second", "last_train_loss", "last_val_loss", "best_val_loss")
    for key in (*kept, "checkpoint_stall_seconds"):
        assert summary(tmp_path / "run")[key] == before[key], key


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


def test_a_diverged_model_ends_with_exit_3_whatever_is_logged_and_sampled(tmp_path):
    options = ["callbacks.sample_tokens=4", "trainer.log_every_n_steps=100", "trainer.max_steps=20"]
    with pytest.raises(Diverged):
        train(tmp_path / "run", "optim.lr=1e30", *options)
    assert summary(tmp_path / "run")["exit_code"] == 3


@pytest.mark.parametrize("choice", ["mlp", "full"])
def test_recomputed_activations_train_the_same_model(tmp_path, choice):
    keys = ["model.dropout=0.2", "trainer.max_steps=5", "callbacks.sample_tokens=5"]
    train(tmp_path / "kept", *keys)
    train(tmp_path / "recomputed", *keys, f"activation_checkpointing={choice}")
    assert_same_checkpoint(checkpoint(tmp_path / "kept", 5), checkpoint(tmp_path / "recomputed", 5))


def test_last_without_a_checkpoint_starts_afresh_and_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(tmp_path / "run", "ckpt_path=last")
    assert "fresh start" in caplog.text
    assert summary(tmp_path / "run")["steps"] == 12


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path):
    train(tmp_path / "run")
    with pytest.raises(UserError, match=r"positions\.weight is \(32, 32\) there, \(64, 32\) here"):
        train(tmp_path / "other", f"init_from={checkpoint(tmp_path / 'run', 12)}", "model.n_positions=64")
    assert summary(tmp_path / "other")["status"] == "refused"
    assert summary(tmp_path / "other")["exit_code"] == 2


def test_a_failure_is_in_the_summary(tmp_path, monkeypatch):
    from gpt2_fp8.train.module import GPT2Module

    def training_step(self, batch, batch_idx):
        raise RuntimeError("the roof fell in")

    monkeypatch.setattr(GPT2Module, "training_step", training_step)
    with pytest.raises(RuntimeError, match="roof"):
        train(tmp_path / "run")
    report = summary(tmp_path / "run")
    assert (report["status"], report["exit_code"]) == ("failed", 1)
    assert "the roof fell in" in report["message"]


def test_a_step_that_is_not_finite_is_skipped_counted_and_survived(tmp_path, monkeypatch):
    from gpt2_fp8.train.module import GPT2Module

    original = GPT2Module.manual_backward

    def manual_backward(self, loss, *args, **kwargs):
        original(self, loss, *args, **kwargs)
        if self.trainer.global_step == 3:
            self.model.positions.weight.grad.fill_(float("nan"))

    monkeypatch.setattr(GPT2Module, "manual_backward", manual_backward)
    train(tmp_path / "run")
    assert summary(tmp_path / "run")["skipped_steps"] == 1
    assert metrics(tmp_path / "run")["skipped_steps"][4] == 1
    assert json.dumps(summary(tmp_path / "run"))


def test_a_run_that_stays_not_finite_ends_as_diverged(tmp_path, monkeypatch):
    from gpt2_fp8.train.module import GPT2Module

    original = GPT2Module.manual_backward

    def manual_backward(self, loss, *args, **kwargs):
        original(self, loss * float("nan") if self.trainer.global_step >= 3 else loss, *args, **kwargs)

    monkeypatch.setattr(GPT2Module, "manual_backward", manual_backward)
    with pytest.raises(Diverged, match="the last 5 steps had no finite loss and gradient"):
        train(tmp_path / "run", "trainer.max_steps=30")
    report = summary(tmp_path / "run")
    assert (report["status"], report["exit_code"], report["steps"]) == ("diverged", 3, 9)
    assert (report["divergence"]["rollbacks"], report["divergence"]["skipped"], report["skipped_steps"]) == (1, 10, 10)
    assert all(torch.isfinite(w).all() for w in read_weights(checkpoint(tmp_path / "run", 8)).values())


def test_a_run_without_a_sound_checkpoint_goes_back_to_its_start(tmp_path, monkeypatch):
    from gpt2_fp8.train.module import GPT2Module

    steps = record_steps(monkeypatch)
    original, spoiled = GPT2Module.manual_backward, []

    def manual_backward(self, loss, *args, **kwargs):
        if 2 <= self.trainer.global_step < 4 and len(spoiled) < 4:  # two micro-batches in each of two steps, once
            spoiled.append(self.trainer.global_step)
            loss = loss * float("nan")
        original(self, loss, *args, **kwargs)

    built, models = setup.build_trainer, []

    def build_trainer(*args):
        assert [model for model in models if model() is not None] == [], "the former one is gone, with its memory"
        return built(*args)

    def configure_model(self, configure=GPT2Module.configure_model):
        configure(self)
        models.append(weakref.ref(self.model))

    monkeypatch.setattr(setup, "build_trainer", build_trainer)
    monkeypatch.setattr(GPT2Module, "configure_model", configure_model)
    monkeypatch.setattr(GPT2Module, "manual_backward", manual_backward)
    train(tmp_path / "run", "callbacks.nonfinite_limit=2", "callbacks.checkpoint_every_n_steps=100")
    assert len(models) >= 2
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


def test_profiler_prints_its_table(tmp_path, caplog):
    train(tmp_path / "run", "debug=profiler", "trainer.max_steps=3", "optim.warmup_steps=1")
    assert summary(tmp_path / "run")["status"] == "completed"


def test_no_validation_where_none_is_wanted(tmp_path):
    assert train(tmp_path / "run", "data.val_sequences=0") is None
    assert "val_loss" not in metrics(tmp_path / "run")
    assert summary(tmp_path / "run")["last_val_loss"] is None


def test_the_host_waits_for_a_step_when_the_next_batch_is_here(tmp_path, monkeypatch):
    """And before a log (steps 1 and 5), a checkpoint (3 and 6) and a validation (4 and 8) at once."""
    from gpt2_fp8.data.lane import Batches
    from gpt2_fp8.runtime.moments import Sent

    events, made, asked = [], Batches.next, Sent.read

    def read(self):
        events.append("wait") if self._read is None else None
        return asked(self)

    monkeypatch.setattr(Batches, "next", lambda self: events.append("batch") or made(self))
    monkeypatch.setattr(Sent, "read", read)
    ends = ["trainer.log_every_n_steps=5", "callbacks.checkpoint_every_n_steps=3", "trainer.val_check_interval=4"]
    train(tmp_path / "run", *ends, "trainer.max_steps=9")
    late, at_once = ["batch", "wait"], ["wait", "batch"]
    assert events == ["batch", *at_once, *late, *at_once * 4, *late, *at_once, "wait"]


def test_what_a_run_logs_by_its_module_is_on_the_host(tmp_path, monkeypatch):
    """Lightning reads it after each later batch: on a GPU, that would wait for the step. See `compat`."""
    log, seen = GPT2Module.log, []
    monkeypatch.setattr(GPT2Module, "log", lambda self, name, value, **how: (
        seen.append((name, isinstance(value, torch.Tensor) and value.device.type)), log(self, name, value, **how)
    ))  # fmt: skip
    train(tmp_path / "run")
    assert set(seen) == {(name, "cpu") for name in ("train_loss", "tokens_per_second", "val_loss")}


@pytest.mark.parametrize("owner", [GPT2Module, pytest.param(Samples, marks=pytest.mark.slow)])
def test_a_hook_around_a_backward_can_read_the_step_before(tmp_path, monkeypatch, owner):
    """Then no gradient is computed before that step is settled. The run is the same."""
    words = ["trainer.log_every_n_steps=100", "callbacks.sample_tokens=3"]
    train(tmp_path / "plain", *words)
    seen = []

    def hook(self, *found):
        module = found[1] if found else self
        seen.append((module.global_step, module.step.schedule.last_epoch, module.step.last))

    monkeypatch.setattr(owner, "on_after_backward", hook)
    train(tmp_path / "hooked", *words)
    assert [(step, settled) for step, settled, _ in seen][::2] == [(step, step) for step in range(12)]
    assert_same_checkpoint(checkpoint(tmp_path / "plain", 12), checkpoint(tmp_path / "hooked", 12))

"""Whole runs in emulated FP8 on a CPU: FP8 learns what bf16 learns, and stops, resumes and changes precision as any."""

import math

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.checkpoint.files import read
from gpt2_fp8.train.footprint import footprint
from tests.runs import assert_same_checkpoint, checkpoint, metrics, record_steps, recorded, summary, train, train_until

pytestmark = pytest.mark.whole
FP8 = ["precision.backend=emulated"]
LEARN = [
    "trainer.max_steps=150", "trainer.val_check_interval=150", "optim.lr=3e-3", "optim.warmup_steps=20", "seed=1",
    "data.seed=0", "data.val_sequences=256", "global_batch_size=16", "micro_batch_size=16",
]  # fmt: skip
QUIET = ["callbacks.checkpoint_every_n_steps=0", "trainer.log_every_n_steps=50"]
NOISE = 0.02  # of the loss; bf16 runs of seeds 2 to 4 deviate by 0.4, 0.5 and 2.4 %, FP8 by 0.5 % at most


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """The validation loss of a short run in bf16, and of its first step."""
    folder = tmp_path_factory.mktemp("bf16")
    loss = train(folder, *LEARN, *QUIET, "precision=bf16")
    assert loss < 3.5 < math.log(257) - 1.5, "it has learnt"
    return loss


@pytest.mark.parametrize("words", [[], ["recipe=current"], ["recipe=block"], ["precision=fp8_e4m3"]], ids=" ".join)
def test_fp8_learns_what_bf16_learns(tmp_path, learnt, words):
    loss = train(tmp_path, *LEARN, *QUIET, *FP8, *words)
    assert loss == pytest.approx(learnt, rel=NOISE)
    assert loss != learnt
    found = summary(tmp_path)
    assert (found["status"], found["divergence"]["events"]) == ("completed", [])


def test_log_and_summary_say_what_is_emulated(tmp_path, caplog):
    with caplog.at_level("INFO"):
        train(tmp_path, *FP8, "precision.emulate=[weight,head]", "trainer.max_steps=3", "trainer.val_check_interval=3")
    said = dict(message.split(maxsplit=1) for message in caplog.messages if " " in message)
    assert said["layers"] == "FP8 emulated in plain torch; emulated weight, head; attention torch's flash kernel"
    assert said["precision"] == "fp8_hybrid, recipe delayed"
    found = summary(tmp_path)
    assert found["precision"] == {"asked": "fp8_hybrid", "ran": "fp8_hybrid", "reason": None, "choice": None}
    assert (found["recipe"], found["kernels"]["emulated"]) == ("delayed", "weight, head")


@pytest.mark.parametrize("words", [["model.dropout=0.1"], ["recipe=block"]], ids=" ".join)
def test_legs_equal_one_run_bit_for_bit(tmp_path, monkeypatch, words):
    words = [*FP8, *words, "activation_checkpointing=full", "precision.keep_bf16=[first]", "model.n_layer=2"]
    whole, logged = recorded(tmp_path / "whole", *words)
    legs = record_steps(monkeypatch)
    train_until(6, tmp_path / "legs", *words)
    del legs[5:]  # the last checkpoint is of the validation after step 5
    train(tmp_path / "legs", *words, "ckpt_path=last")
    assert legs == whole
    assert_same_checkpoint(checkpoint(tmp_path / "legs", 12), checkpoint(tmp_path / "whole", 12))
    assert metrics(tmp_path / "legs")["val_loss"] == logged["val_loss"]


def test_the_estimate_of_host_memory_covers_it():
    """The shape was measured: 1,083 MiB at its peak, and 919 in float32, which a CPU has otherwise."""
    shape = ["trainer=cpu", "model.n_layer=6", "model.n_embd=256", "micro_batch_size=16"]
    (ours,), (theirs,) = (compose.preflight([*shape, *words]) for words in (FP8, []))
    assert 1083 << 20 < footprint(ours, 257).of(16) < 1.5 * (1083 << 20)
    assert footprint(theirs, 257).of(16) < footprint(ours, 257).of(16)


def test_scales_are_saved_with_their_settings(tmp_path, caplog):
    train(tmp_path, *FP8)
    scaling = read(checkpoint(tmp_path, 12))["training_step"]["scaling"]
    assert "emulated" in scaling["settings"]
    assert "'wgrad_input'" in scaling["settings"]
    assert scaling["scales.scaling_fwd.scale"].numel() == 2 * 5
    assert scaling["scales.scaling_bwd.amax_history"].shape == (16, 4)
    assert (scaling["scales.scaling_bwd.amax_history"][1:12] > 0).all()


@pytest.mark.parametrize(("first", "second"), [("precision=bf16", FP8[0]), (FP8[0], "precision=bf16")])
def test_a_checkpoint_moves_to_the_plain_layers_and_back(tmp_path, first, second):
    train(tmp_path, first, "trainer.max_steps=6", "trainer.val_check_interval=6")
    before = summary(tmp_path)["last_val_loss"]
    train(tmp_path, second, "ckpt_path=last")
    after = summary(tmp_path)
    assert after["steps"] == 12
    assert after["precision"]["ran"] == ("bf16" if "bf16" in second else "fp8_hybrid")
    assert after["last_val_loss"] < before


def test_a_step_that_is_not_finite_is_run_again_in_bf16(tmp_path, monkeypatch):
    """The FP8 loss of one step is made infinite; its twin of plain layers computes the step."""
    from gpt2_fp8.backends.emulated import Emulated

    calls, own = [], Emulated.loss

    def loss(self, model, *given):
        calls.append(model.training)
        found = own(self, model, *given)
        return found * math.inf if calls.count(True) == 8 and model.training else found

    monkeypatch.setattr(Emulated, "loss", loss)
    train(tmp_path, *FP8)
    found = summary(tmp_path)
    assert (found["status"], found["steps"], found["skipped_steps"]) == ("completed", 12, 0)
    assert found["divergence"]["reruns"] == 1
    assert found["precision"]["ran"] == "fp8_hybrid"

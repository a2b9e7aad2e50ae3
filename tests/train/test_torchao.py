"""Whole runs with torchao's layers on a CPU, where only these tests emulate them: learning, resume, other layers."""

import math

import pytest

from gpt2_fp8.backends import resolve
from gpt2_fp8.backends.torchao import Torchao
from gpt2_fp8.checkpoint.files import read
from gpt2_fp8.config import backend_support
from tests.runs import assert_same_checkpoint, checkpoint, metrics, record_steps, recorded, summary, train, train_until

pytestmark = pytest.mark.whole
FP8 = ["precision.backend=torchao"]
LEARN = [
    "trainer.max_steps=150", "trainer.val_check_interval=150", "optim.lr=3e-3", "optim.warmup_steps=20", "seed=1",
    "data.seed=0", "data.val_sequences=256", "global_batch_size=16", "micro_batch_size=16",
]  # fmt: skip
QUIET = ["callbacks.checkpoint_every_n_steps=0", "trainer.log_every_n_steps=50"]
NOISE = 0.02  # of the loss, as tests/train/test_emulated.py has it


@pytest.fixture
def emulating(monkeypatch):
    """A CPU that is taken for a GPU with FP8 units; the products are computed from FP8's numbers."""
    monkeypatch.setattr(Torchao, "emulate", True)
    monkeypatch.setattr(Torchao, "why_not", classmethod(lambda cls, config: backend_support.why_not_torchao(config)))
    monkeypatch.setattr(resolve, "why_not_recipe", lambda name: None)
    monkeypatch.setattr(resolve, "_why_not_fp8", lambda config, device: None)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """The validation loss of a short run in bf16."""
    loss = train(tmp_path_factory.mktemp("bf16"), *LEARN, *QUIET, "precision=bf16")
    assert loss < 3.5 < math.log(257) - 1.5, "it has learnt"
    return loss


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize(
    "words", [[], ["recipe=rowwise", "precision=fp8_e4m3", "precision.backward=bf16_wgrad"]], ids=" ".join
)
def test_it_learns_what_bf16_learns(tmp_path, learnt, words):
    loss = train(tmp_path, *LEARN, *QUIET, *FP8, *words)
    assert loss == pytest.approx(learnt, rel=NOISE)
    assert loss != learnt
    found = summary(tmp_path)
    assert (found["status"], found["divergence"]["events"]) == ("completed", [])
    assert found["recipe"] == ("rowwise" if words else "current")
    assert found["kernels"]["layers"] == "torchao's float8"


@pytest.mark.slow  # 50 s, nearly all of them torch.compile
@pytest.mark.usefixtures("emulating")
def test_it_can_be_compiled(tmp_path):
    """Inductor leaves out roundings between operations, so the losses are near and not equal."""
    words = ["trainer.max_steps=4", "trainer.val_check_interval=4", "activation_checkpointing=mlp"]
    plain, compiled = (train(tmp_path / f"compile_{c}", *FP8, *words, f"compile={c}") for c in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=0.01)
    assert summary(tmp_path / "compile_true")["kernels"]["layers"] == "torchao's float8, compiled"


@pytest.mark.usefixtures("emulating")
def test_legs_equal_one_run_bit_for_bit(tmp_path, monkeypatch):
    words = [*FP8, "model.dropout=0.1", "activation_checkpointing=full", "model.n_layer=2"]
    words += ["recipe=rowwise", "precision.keep_bf16=[blocks.0.fc1,blocks.1.qkv]"]
    whole, logged = recorded(tmp_path / "whole", *words)
    legs = record_steps(monkeypatch)
    train_until(6, tmp_path / "legs", *words)
    del legs[5:]  # the last checkpoint is of the validation after step 5
    train(tmp_path / "legs", *words, "ckpt_path=last")
    assert legs == whole
    assert_same_checkpoint(checkpoint(tmp_path / "legs", 12), checkpoint(tmp_path / "whole", 12))
    assert metrics(tmp_path / "legs")["val_loss"] == logged["val_loss"]


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize(
    "backends",
    [
        ["precision=bf16", *FP8, "precision.backend=emulated"],
        ["precision.backend=emulated", *FP8, "precision=bf16", *FP8],
    ],
)
def test_a_checkpoint_moves_between_layers(tmp_path, backends):
    """There and back: each leg begins with the weights and the moments of the one before, under the same names."""
    losses, names = [], set()
    for leg, words in enumerate(backends, 1):
        resumed = ["ckpt_path=last"] if leg > 1 else []
        train(tmp_path, words, f"trainer.max_steps={6 * leg}", "trainer.val_check_interval=6", *resumed)
        found = summary(tmp_path)
        losses.append(found["last_val_loss"])
        assert found["steps"] == 6 * leg
        assert found["precision"]["ran"] == ("bf16" if "bf16" in words else "fp8_hybrid")
        names.add(tuple(sorted(read(checkpoint(tmp_path, 6 * leg))["state_dict"])))
    assert losses == sorted(losses, reverse=True)
    assert len(names) == 1
    logged = metrics(tmp_path)["train_loss"]
    jumps = [abs(logged[6 * leg + 1] - logged[6 * leg]) for leg in range(1, len(backends))]
    assert max(jumps) < 2 * max(abs(logged[i + 1] - logged[i]) for i in range(1, 6)), "no leg begins anew"


@pytest.mark.usefixtures("emulating")
def test_a_step_that_is_not_finite_is_run_again_in_bf16(tmp_path, monkeypatch):
    calls, own = [], Torchao.loss

    def loss(self, model, *given):
        calls.append(model.training)
        found = own(self, model, *given)
        return found * math.inf if calls.count(True) == 8 and model.training else found

    monkeypatch.setattr(Torchao, "loss", loss)
    train(tmp_path, *FP8)
    found = summary(tmp_path)
    assert (found["status"], found["steps"], found["skipped_steps"]) == ("completed", 12, 0)
    assert found["divergence"]["reruns"] == 1


def test_a_run_on_a_cpu_does_not_emulate(tmp_path):
    train(tmp_path, *FP8, "trainer.max_steps=3", "trainer.val_check_interval=3")
    found = summary(tmp_path)["precision"]
    assert found["ran"] == "fp32"
    assert "no FP8" in found["reason"] or "no CUDA" in found["reason"] or "without CUDA" in found["reason"]

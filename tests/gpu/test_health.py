"""FP8's health on a GPU: its places in the fused and Transformer Engine's state, and that looking changes nothing."""

import csv
import math

import pytest

from gpt2_fp8.engine.fp8_health import FP8Health
from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.fp8_tensors import fp8_tensors
from gpt2_fp8.fp8.resolve import resolve
from gpt2_fp8.fp8.support import why_no_torchao
from gpt2_fp8.kernels.formats import EXPONENT, LOGITS_EXPONENT
from gpt2_fp8.measure import worker
from gpt2_fp8.runtime import rng
from tests.gpu.common import VOCAB, assert_same_tensors, composed, hopper, tokens
from tests.gpu.test_runs import ON_GPU
from tests.runs import metrics, train

pytestmark = pytest.mark.fp8
without_torchao = pytest.mark.skipif(why_no_torchao() is not None, reason="torchao is not here")
FUSED = [
    pytest.param(["precision.backend=fused", "recipe=delayed", "cuda_graphs=false"], marks=hopper),
    pytest.param(["precision.backend=fused", "recipe=delayed", "cuda_graphs=true"], marks=hopper),
]
DELAYED = [
    *FUSED,
    ["precision.backend=te", "recipe=delayed"],
    ["precision.backend=te", "recipe=delayed", "precision.keep_bf16=[blocks.0.fc1]"],  # an MLP of two modules
    ["precision.backend=te", "recipe=delayed", "activation_checkpointing=full"],
    ["precision.backend=emulated", "recipe=delayed", "compile=false"],
]
ROWS = 4 * 128  # of a micro-batch
STATELESS = [
    ["precision.backend=te", "recipe=current"],
    ["precision.backend=te", "recipe=block"],
    pytest.param(["precision.backend=torchao", "recipe=rowwise", "compile=false"], marks=[without_torchao, hopper]),
]


def trained(*words, steps=3):
    """A training step that has made some, each with other text, and the text of the last."""
    config = composed(*words, "optim.lr=1e-6")
    step = worker.build(config, resolve(config, "cuda"), VOCAB)
    for i in range(steps):
        ids = tokens(12, i, 128)
        step(ids)
        step.settle()
    return step, ids


@pytest.mark.parametrize("words", [*DELAYED, *STATELESS], ids=" ".join)
def test_looking_at_a_healthy_model_changes_nothing(words):
    step, ids = trained(*words)
    health = FP8Health(step)
    weights = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    scales, drawn = state.capture(step.model), rng.capture_torch()
    seen = health.sample(ids, health.read())
    assert health.failed is None
    for h in seen:
        assert 0 <= h.saturated < 1e-3, h
        assert 0 <= h.flushed < 0.05, h
        assert 1e-3 < h.scale < 2.0**60, h
    assert [health.tensor for health in seen] == fp8_tensors(step.config.precision, step.config.model.n_layer)
    for now, before in (
        (step.model.state_dict(), weights), (state.capture(step.model), scales), (rng.capture_torch(), drawn),
    ):  # fmt: skip
        assert_same_tensors(now, before)
    assert all(parameter.grad is None for parameter in step.model.parameters())
    step(ids)  # and it goes on
    assert math.isfinite(step.last.read().loss)


@pytest.mark.parametrize("words", DELAYED, ids=" ".join)
def test_stored_amaxes_are_those_of_the_tensors_they_are_said_to_be_of(words):
    """Against a pass over the same text: tensors of a model differ by far more than a factor of 1.5."""
    step, ids = trained(*words)
    health = FP8Health(step)
    stored = {h.tensor: h for h in health.read()}
    own_scale = hasattr(step.model.head, "gradient_factor")
    assert len(stored) == len(health.tensors) - own_scale, "the head's gradient has a scale of its own"
    found = health._pass(ids, step.share, step.micro_batch_size, {})
    for tensor, h in stored.items():
        amax = found[tensor][0].item()
        assert 1 / 1.5 < amax / h.amax < 1.5, (str(tensor), amax, h.amax)
        assert -1.5 < h.headroom < 3, (str(tensor), h)
        assert 0 <= h.age < 4


@hopper
@pytest.mark.parametrize("fewest", [ROWS, ROWS + 1], ids=["probabilities", "logits"])
def test_the_heads_factor_is_the_kernels(monkeypatch, fewest):
    """Whichever of both ways a micro-batch goes."""
    from gpt2_fp8.layers.head import _Gradients

    asked, scale_inv = [], _Gradients.scale_inv
    monkeypatch.setattr("gpt2_fp8.kernels.product.FEWEST_ROWS", fewest)
    monkeypatch.setattr(_Gradients, "scale_inv", lambda self, f: asked.append(f) or scale_inv(self, f))
    step, _ = trained("precision.backend=fused", "recipe=delayed", "cuda_graphs=false", steps=1)
    factor = step.model.head.gradient_factor(ROWS)
    assert factor == asked[0] == (2**EXPONENT if fewest == ROWS else 2**LOGITS_EXPONENT)


@pytest.mark.parametrize("words", [*FUSED, ["precision.backend=te"], ["precision.backend=te", "recipe=current"]])
def test_a_run_logs_it(tmp_path, words, caplog):
    train(tmp_path, *words, "callbacks.fp8_health_every_n_steps=4", base=ON_GPU)
    with (tmp_path / "fp8.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["step"] for row in rows} >= {"1", "12"}
    assert len(rows) % (3 * (2 * 4 + 1)) == 0
    assert all(float(row["saturated"]) < 1e-2 for row in rows)
    assert 12 in metrics(tmp_path)["fp8/headroom_gradient"]
    assert [message for message in caplog.messages if "FP8:" in message] == []

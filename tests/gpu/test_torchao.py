"""torchao's FP8 products on a GPU: near Transformer Engine's current scaling, and a run that learns.

The models are not compiled, which these tests have no time for; the last one is, and is slow for that.
"""

import pytest
import torch

from gpt2_fp8.fp8.support import why_no_torchao
from tests.gpu.common import bf16, build, computing, error, gradients, tokens
from tests.gpu.test_runs import ON_GPU
from tests.runs import summary, train

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or why_no_torchao() is not None, reason="torchao cannot run here"
)
ROWWISE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
rowwise = pytest.param("rowwise", marks=pytest.mark.skipif(not ROWWISE, reason="it needs Hopper"))


@pytest.mark.parametrize("precision", ["fp8_hybrid", "fp8_e4m3"])
@pytest.mark.parametrize("recipe", ["current", rowwise])
@pytest.mark.parametrize("backward", ["fp8", "bf16_wgrad", "bf16"])
def test_gradients_are_near_those_of_bf16(recipe, precision, backward):
    ids = tokens(4)
    fp8 = computing("torchao", recipe=recipe, precision=precision, backward=backward)
    model = build("torchao", recipe=recipe, precision=precision, backward=backward)
    loss, ours = gradients(model, ids, False, fp8.forward_context)
    expected_loss, expected = gradients(build("reference"), ids, False, bf16)
    assert loss == pytest.approx(expected_loss, rel=0.005)
    assert 1e-4 < error(ours, expected) < 0.15


@pytest.mark.fp8
def test_tensorwise_is_as_near_to_bf16_as_transformer_engines_current_scaling():
    ids = tokens(4)
    expected = gradients(build("reference"), ids, False, bf16)[1]
    far = {}
    for name in ("te", "torchao"):
        model, fp8 = build(name, recipe="current"), computing(name, recipe="current")
        far[name] = error(gradients(model, ids, False, fp8.forward_context)[1], expected)
    assert far["torchao"] < 1.3 * far["te"], far


def test_a_run_learns(tmp_path):
    loss = train(tmp_path, "precision.backend=torchao", "compile=false", base=ON_GPU)
    found = summary(tmp_path)
    assert (found["precision"]["ran"], found["recipe"]) == ("fp8_hybrid", "current")
    assert loss < 5.5


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", rowwise])
def test_compiled_it_is_near_what_is_not(recipe):
    ids = tokens(4)
    fp8 = computing("torchao", recipe=recipe)
    assert fp8.compiled
    model = build("torchao", recipe=recipe)
    expected_loss, expected = gradients(model, ids, False, fp8.forward_context)
    model.zero_grad(set_to_none=True)
    compiled = torch.compile(fp8.loss)
    with fp8.forward_context():
        loss = compiled(model, ids, None, 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss, rel=0.005)
    assert error({name: p.grad.float() for name, p in model.named_parameters()}, expected) < 0.1

"""Attention within documents on a GPU: plain layers, compiled, and Transformer Engine's."""

import pytest
import torch

from tests.gpu.common import composed, error, grads, prepared, tokens

END = 50256
LAYERS = {
    "plain": ["precision=bf16", "compile=false"],
    "recomputed": ["precision=bf16", "compile=false", "activation_checkpointing=full"],
    "compiled": ["precision=bf16", "compile=true", "model.n_layer=1"],
    "te": ["recipe=delayed"],
    "te, recomputed": ["recipe=delayed", "activation_checkpointing=full"],
}
MARKS = {"te": [pytest.mark.fp8], "compiled": [pytest.mark.slow]}
WORDS = ["data.tokenizer=gpt2", "document_mask=true"]


def ids(seed=0):
    found = tokens(12, seed, 128)
    found[:, [0, 40, 41, 90]] = END
    return found


def found(*words):
    engine = prepared(*words)
    return engine, engine.of_step(ids(), engine.micro_batch_size).item(), grads(engine.model)


@pytest.mark.parametrize("layers", [pytest.param(name, marks=MARKS.get(name.partition(",")[0], [])) for name in LAYERS])
def test_gradients_are_those_of_plain_layers_in_float32(layers):
    engine, loss, gradients = found(*WORDS, *LAYERS[layers])
    assert engine.model.separator == END
    if layers.startswith("te"):
        assert engine.plan.backend.name == "te"
        assert "document_mask=true" in engine.plan.backend.kernels(50257)["layers"]
    same = [word for word in LAYERS[layers] if word.startswith("model.")]
    _, expected_loss, expected = found(*WORDS, "precision=fp32", "compile=false", *same)
    assert loss == pytest.approx(expected_loss, rel=3e-3)
    assert error(gradients, expected) < (0.15 if layers.startswith("te") else 0.05)
    _, without, _ = found("precision=fp32", "compile=false", *same)
    assert without != expected_loss


def test_a_later_document_sees_nothing_of_an_earlier_one():
    engine = prepared(*WORDS, *LAYERS["plain"])
    one, other = ids(), ids()
    other[:, :40] = ids(1)[:, :40]
    with torch.no_grad(), engine.plan.backend.forward_context():
        logits = [engine.model(batch[:, :-1].long()) for batch in (one, other)]
    assert not torch.equal(logits[0][:, :41], logits[1][:, :41])
    assert torch.equal(logits[0][:, 41:], logits[1][:, 41:])


def test_the_kernel_is_one_that_takes_a_mask():
    from gpt2_fp8.fp8.resolve import resolve

    said = resolve(composed(*WORDS, *LAYERS["plain"]), "cuda").backend.kernels(50257)["attention"]
    assert said.endswith("within documents")
    assert "flash" not in said

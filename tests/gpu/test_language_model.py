"""`gpt2_fp8.build` on a GPU: a loop of one's own beside the training step of a run."""

from __future__ import annotations

import pytest
import torch

import gpt2_fp8
from gpt2_fp8.fp8.resolve import resolve
from gpt2_fp8.measure import worker
from tests.gpu.common import determinism, error, grads, hopper
from tests.train.test_language_model import trained

WORDS = [
    "model.n_layer=2", "model.n_embd=128", "model.n_head=2", "model.n_positions=128", "data.tokenizer=bytes",
    "global_batch_size=4", "micro_batch_size=4", "trainer.max_steps=6", "optim.warmup_steps=2", "cuda_graphs=false",
    "optim.max_grad_norm=1e6",
]  # fmt: skip
FP8 = "precision=fp8_hybrid precision.fallback=error precision.backend="
# A sum in another order may flip an FP8 code: on an H200, a loop of four sequences and a step of four micro-batches of
# one had losses 2.1e-4 to 3.4e-4 apart. Here both compute the same batch, through code that is compiled twice or not.
KINDS = {  # by words: the bounds of losses, and of the first gradients by their norms
    "precision=fp32 compile=false": (1e-6, 1e-5),
    "precision=bf16 compile=false": (1e-5, 1e-3),
    f"{FP8}te recipe=delayed": (1e-3, 0.05),
    f"{FP8}te recipe=current": (1e-3, 0.05),
    f"{FP8}torchao recipe=current": (1e-3, 0.05),
    f"{FP8}fused recipe=delayed": (1e-3, 0.05),
}
MARKS = {"fused": [pytest.mark.fp8, hopper], "te": [pytest.mark.fp8], "torchao": [pytest.mark.fp8]}


def marks(kind: str) -> list[pytest.MarkDecorator]:
    return MARKS.get(kind.partition("backend=")[2].partition(" ")[0], [])


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks(kind)) for kind in KINDS])
def test_a_plain_loop_has_the_losses_and_first_gradients_of_a_run(kind: str) -> None:
    """Without clipping, which would hide a scale that all gradients lack."""
    of_losses, of_gradients = KINDS[kind]
    ids = torch.randint(256, (6, 4, 129), generator=torch.Generator().manual_seed(1)).cuda()
    with determinism():
        first, model = (gpt2_fp8.build(*WORDS, *kind.split()) for _ in range(2))
        first(ids[0, :, :-1], ids[0, :, 1:]).backward()
        losses, _ = trained(model, ids)
        step = worker.build(model.config, resolve(model.config, "cuda"), model.vocab_size)
        found, of_run = [], []
        step.on_settled.append(lambda result: of_run.append(result.read().loss))
        for batch in ids:
            step(batch.int(), lambda: (found.append(grads(step.model)), step.optimizer.step()))
        step.settle()
    assert losses.tolist() == pytest.approx(of_run, rel=of_losses)
    assert error(grads(first.model), found[0]) < of_gradients
    with torch.no_grad():
        assert model.eval()(ids[0][:, :-1]).shape == (4, 128, model.vocab_size)

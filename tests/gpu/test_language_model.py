"""`gpt2_fp8.build` on a GPU: a loop of one's own beside the training step of a run."""

from __future__ import annotations

import pytest
import torch

import gpt2_fp8
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.fp8.resolve import resolve
from tests.train.test_language_model import trained

pytestmark = pytest.mark.fp8
WORDS = [
    "model.n_layer=2", "model.n_embd=128", "model.n_head=2", "model.n_positions=128", "data.tokenizer=bytes",
    "global_batch_size=4", "micro_batch_size=4", "trainer.max_steps=6", "optim.warmup_steps=2", "cuda_graphs=false",
    "precision=fp8_hybrid", "precision.fallback=error",
]  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    ["precision.backend=fused recipe=delayed", "precision.backend=te recipe=delayed",
     "precision.backend=te recipe=current", "precision.backend=torchao recipe=current"],
)  # fmt: skip
def test_a_plain_loop_has_the_losses_of_a_run(kind: str) -> None:
    if "fused" in kind and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the fused layers' kernels are made for Hopper")
    model = gpt2_fp8.build(*WORDS, *kind.split())
    ids = torch.randint(256, (6, 4, 129), generator=torch.Generator().manual_seed(1)).cuda()
    losses, _ = trained(model, ids)
    with torch.device("cuda"):
        step = TrainingStep(model.config, resolve(model.config, "cuda"), model.vocab_size)
    step.initialise()
    step.prepare_optimizer()
    of_run = []
    step.on_settled.append(lambda result: of_run.append(result.read().loss))
    for batch in ids:
        step(batch.int())
    step.settle()
    assert losses.tolist() == pytest.approx(of_run, rel=1e-4)
    with torch.no_grad():
        assert model.eval()(ids[0][:, :-1]).shape == (4, 128, model.vocab_size)

"""A model divided among several processes on a CPU (`trainer=fsdp`): it computes and saves what one process does."""

import json

import pytest
from safetensors import safe_open

from tests.ranks import BATCH, TWO, fault, run
from tests.runs import SMALL, checkpoint, metrics, summary, train

MODEL = ["model.n_layer=2"]
DIVIDED = [*SMALL[1:], *MODEL, *BATCH, "trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=2"]
EXACT = ["precision=fp32", "trainer.gather=float32"]
LLAMA = [
    "model.norm=rms_norm", "model.mlp=swiglu", "model.positions=rope", "model.tied_head=false", "model.bias=false",
    "model.n_kv_head=1", "model.qk_norm=true",
]  # fmt: skip
# A low rate: at a high one a run leaves its like exponentially, whatever makes the first bit of difference.
FIFTY = ["trainer.max_steps=50", "trainer.val_check_interval=25", "optim.lr=1e-4", "callbacks.sample_tokens=4"]
EMULATED = ["precision=fp8_hybrid", "precision.backend=emulated"]
KINDS = {
    "fp32": ([*EXACT, "logger.histograms_every_n_steps=10"], ["precision=fp32"], 2),
    "delayed": (
        [*EMULATED, "recipe=delayed", "precision.bf16_last_steps=5", "callbacks.fp8_health_every_n_steps=10"], None, 2
    ),
    "bf16, four": (["precision=bf16", *LLAMA, "trainer.shard=2", "trainer.reshard=false"], ["precision=bf16", *LLAMA], 4),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_are_those_of_one_process(tmp_path, kind):
    words, alone, count = KINDS[kind]
    alone = words if alone is None else alone
    output = run(tmp_path, *DIVIDED, *FIFTY, f"trainer.devices={count}", *words, "run_name=run")
    train(tmp_path / "one", *MODEL, *BATCH, *FIFTY, *alone)
    own, theirs = metrics(tmp_path / "outputs/run"), metrics(tmp_path / "one")
    for column in ("train_loss", "val_loss"):
        assert own[column] == pytest.approx(theirs[column], rel=5e-4), column
    assert own["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
    assert "Warning" not in output
    print(output)

"""A model divided among several processes on a CPU (`trainer=fsdp`): it computes and saves what one process does."""

import json

import pytest
from safetensors import safe_open

from tests.ranks import BATCH, fault, run
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


# A run is cut in the validation of a step that was saved before it.
CUT = """
from gpt2_fp8.callbacks.progress import LogLine

def cut(self, trainer, module, *_):
    if trainer.global_step == {step} and not trainer.sanity_checking:
        raise RuntimeError("the machine stopped")

LogLine.on_validation_batch_start = cut
"""
LEGS = [("ddp", 2), ("fsdp", 2), ("fsdp", 4), ("cpu", 1), ("ddp", 2)]


def leg(strategy, count):
    words = [*SMALL[1:], *MODEL, *BATCH, f"trainer={strategy}", "trainer.accelerator=cpu", f"trainer.devices={count}"]
    return words + ["trainer.gather=float32"] * (strategy == "fsdp")


def contents(folder):
    """The names, shapes and dtypes of a checkpoint's tensors, by file, and what its manifest says of these."""
    found = {}
    manifest = json.loads((folder / "manifest.json").read_text())
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            found[path.name] = {key: (each.get_shape(), each.get_dtype()) for key, each in slices.items()}
    return found | {"manifest": (manifest.keys(), manifest["files"].keys())}


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16"])
def test_a_run_moves_between_numbers_of_ranks_and_strategies(tmp_path, optimizer):
    """Its fourth step is validated in the second leg, and so on: each leg ends in a validation that is due."""
    words = ["precision=fp32", f"optimizer={optimizer}", "trainer.max_steps=20", "trainer.val_check_interval=4",
             "callbacks.keep_checkpoints=9"]  # fmt: skip
    train(tmp_path / "one", *MODEL, *BATCH, *words)
    theirs = metrics(tmp_path / "one")
    for i, (strategy, count) in enumerate(LEGS):
        more = [*leg(strategy, count), *words, "run_name=run"] + ["ckpt_path=last"] * (i > 0)
        last = i + 1 == len(LEGS)
        run(tmp_path, *more, patch=CUT.format(step=0 if last else 4 * i + 4), code=0 if last else 1)
        own = metrics(tmp_path / "outputs/run")
        steps = range(1, 4 * i + 5)
        for column in ("train_loss", "grad_norm", "val_loss"):
            expected = {step: theirs[column][step] for step in own.get(column, {})}
            assert own.get(column, {}) == pytest.approx(expected, rel=1e-5), (strategy, count, column)
        assert list(own["train_loss"]) == list(steps)
    assert list(own["val_loss"]) == list(theirs["val_loss"])
    two, divided, four = (contents(checkpoint(tmp_path / "outputs/run", step)) for step in (4, 8, 12))
    assert divided == two
    assert four["model.safetensors"] == two["model.safetensors"]
    assert four["optimizer.safetensors"] == two["optimizer.safetensors"]


FEW = ["trainer.max_steps=6", "trainer.val_check_interval=6", "optim.lr=1e-4"]
# On both ranks at one place, as GPUs of one size do: in the first forward, and in step 4 in the second backward.
OUT_OF_MEMORY = """
import torch

def no_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")

def training_step(self, batch, batch_idx):
    seen = []

    def fail(block, inputs):
        seen.append(inputs)
        size = self.step.micro_batch_size
        if self.global_step == 0 and size == 4:
            no_memory()
        if self.global_step == 3 and size == 2 and len(seen) == 2:
            inputs[0].register_hook(no_memory)

    handle = self.model.blocks[1].register_forward_pre_hook(fail)
    original(self, batch, batch_idx)
    self.step.settle()
    handle.remove()

GPT2Module.training_step = training_step
"""


def test_out_of_memory_on_all_ranks_begins_the_step_again(tmp_path):
    words = [*MODEL, *FEW, "precision=fp32", "trainer.val_check_interval=3"]
    train(tmp_path / "small", *words, "micro_batch_size=1")
    output = run(tmp_path, *DIVIDED, *words, *EXACT, "micro_batch_size=4", "run_name=run", patch=OUT_OF_MEMORY)
    assert "micro_batch_size 2 instead of 4" in output
    assert "micro_batch_size 1 instead of 2" in output
    own, small = metrics(tmp_path / "outputs/run"), metrics(tmp_path / "small")
    for column in ("train_loss", "val_loss", "grad_norm"):
        assert own[column] == pytest.approx(small[column], rel=1e-6), column


NAN = """
from gpt2_fp8.engine.gradients import Gradients
of_step = Gradients.of_step
steps = [0]

def not_finite(self, *inputs):
    steps[0] += 1
    bad = steps[0] == 3 and os.environ["RANK"] == "1"
    return of_step(self, *inputs) * (float("nan") if bad else 1.0)

Gradients.of_step = not_finite
"""


@pytest.mark.parametrize("precision", ["fp32", "emulated"])
def test_a_loss_that_is_not_finite_on_one_rank_is_left_out_on_both(tmp_path, precision):
    words = EXACT if precision == "fp32" else [*EMULATED, "recipe=current"]
    output = run(tmp_path, *DIVIDED, *FEW, *words, "run_name=run", patch=NAN)
    report = summary(tmp_path / "outputs/run")
    assert report["status"] == "completed"
    assert report["skipped_steps"] == (1 if precision == "fp32" else 0), output
    assert metrics(tmp_path / "outputs/run")["bf16_reruns"][6] == (0 if precision == "fp32" else 1)


def test_sigterm_to_one_rank_saves_the_whole_model(tmp_path):
    run(tmp_path, *DIVIDED, *FEW, *EXACT, "run_name=run", patch=fault(1, 2, "SIGTERM"), code=143)
    assert summary(tmp_path / "outputs/run")["status"] == "stopped"
    names = contents(checkpoint(tmp_path / "outputs/run", 3))["model.safetensors"]
    assert names["tokens.weight"] == ([320, 32], "F32")

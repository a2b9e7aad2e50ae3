"""A model divided among several processes on a CPU (`trainer=fsdp`): it computes and saves what one process does."""

import csv
import json
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.ranks import BATCH, fault, run
from tests.runs import SMALL, checkpoint, metrics, summary, train

MODEL = ["model.n_layer=2"]
FSDP = ["trainer=fsdp", "trainer.accelerator=cpu", "trainer.gather=float32"]
DIVIDED = [*SMALL[1:], *MODEL, *BATCH, *FSDP, "trainer.devices=2"]
LLAMA = [
    "model.norm=rms_norm", "model.mlp=swiglu", "model.positions=rope", "model.tied_head=false", "model.bias=false",
    "model.n_kv_head=1", "model.qk_norm=true",
]  # fmt: skip
EMULATED = ["precision=fp8_hybrid", "precision.backend=emulated"]
# A low rate: at a high one a run leaves its like exponentially, whatever makes the first bit of difference.
ONE = ["precision=fp32", "logger=[default,tensorboard]", "logger.histograms_every_n_steps=10"]
FP8 = [*EMULATED, *LLAMA, "recipe=delayed", "precision.bf16_last_steps=5", "activation_checkpointing=full"]
AVERAGED = ["precision=bf16", "micro_batch_size=1", "optim.ema_decay=0.8", "callbacks.ranking=items.jsonl"]
COPIES = ["trainer.gather=bfloat16", "trainer.shard=2", "trainer.reshard=false"]
KINDS = {
    "fp32": (2, 20, ONE, []),
    "fp8": (2, 20, FP8, ["trainer.gather=bfloat16"]),
    "copies": (4, 10, AVERAGED, COPIES),
}
DIGEST = """
import hashlib
from gpt2_fp8.runtime.sharding import local

def on_train_end(self):
    weights = b"".join(local(weight.detach()).numpy().tobytes() for weight in self.model.state_dict().values())
    Path(f"rank-{self.global_rank}").write_text(hashlib.sha256(weights).hexdigest())

GPT2Module.on_train_end = on_train_end
"""


@pytest.mark.parametrize("kind", KINDS)
def test_divided_among_ranks_a_run_is_that_of_one_process(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    items = [{"ctx": "import", "endings": ["os", "\x00 \x01" * i, "a long one"], "label": 0} for i in range(1, 6)]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, items)))
    ranks, steps, words, own = KINDS[kind]
    words = [
        *words, f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps // 2}", "optim.lr=1e-4",
        "callbacks.sample_tokens=4", "callbacks.fp8_health_every_n_steps=10",
    ]  # fmt: skip
    output = run(tmp_path, *DIVIDED, f"trainer.devices={ranks}", *words, *own, "run_name=run", patch=DIGEST)
    assert "Warning" not in output
    assert output.count("sample at step") == 2
    train(tmp_path / "one", *MODEL, *BATCH, *words)
    folders = tmp_path / "outputs/run", tmp_path / "one"
    divided, alone = map(metrics, folders)
    for column in ("train_loss", "val_loss"):
        assert divided[column] == pytest.approx(alone[column], rel=5e-4), column
    assert divided["grad_norm"] == pytest.approx(alone["grad_norm"], rel=2e-2)
    weights = [(tmp_path / f"rank-{rank}").read_text() for rank in range(ranks)]
    assert weights == weights[:2] * (ranks // 2)
    assert weights[0] != weights[1]
    if kind == "copies":  # a forward leaves weights gathered, which must not be those of the average
        assert divided["ranking/acc"] == alone["ranking/acc"]
        assert difference_of_averages(*(checkpoint(folder, steps) for folder in folders)) < 0.2
    if kind == "fp32":
        one, other = map(histograms, folders)
        assert one.keys() == other.keys()
        assert all(one[tag] == pytest.approx(other[tag], rel=1e-4) for tag in one)
    if kind == "fp8":
        one, other = ([row[:4] for row in csv.reader((folder / "fp8.csv").open())] for folder in folders)
        assert one == other, "the steps and tensors"


def difference_of_averages(checkpoint, other):
    """How far an average of weights is from another, as a part of how far that is from the weights."""
    own, theirs = (load_file(folder / "average.safetensors") for folder in (checkpoint, other))
    weights = load_file(other / "model.safetensors")
    assert own.keys() == theirs.keys() == weights.keys()
    apart, behind = (
        torch.cat([(one[name] - theirs[name]).flatten() for name in theirs]).norm() for one in (own, weights)
    )
    return float(apart / behind)


def histograms(folder):
    """{tensor and step: the number of its values, their sum of squares}."""
    events = EventAccumulator(str(folder / "tensorboard"), {"histograms": 0}).Reload()
    return {
        (tag, event.step): (event.histogram_value.num, event.histogram_value.sum_squares)
        for tag in events.Tags()["histograms"]
        for event in events.Histograms(tag)
    }


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
    chosen = FSDP if strategy == "fsdp" else [f"trainer={strategy}", "trainer.accelerator=cpu"]
    return [*SMALL[1:], *MODEL, *BATCH, *chosen, f"trainer.devices={count}"]


def contents(folder):
    """The names, shapes and dtypes of a checkpoint's tensors, by file, and what its manifest says of these."""
    found = {}
    manifest = json.loads((folder / "manifest.json").read_text())
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            found[path.name] = {key: (each.get_shape(), each.get_dtype()) for key, each in slices.items()}
    return found | {"manifest": (manifest.keys(), manifest["files"].keys())}


def test_a_run_moves_between_numbers_of_ranks_and_strategies(tmp_path):
    """Its third step is validated in the second leg, and so on: each leg ends with a validation that is due.

    The moments in bfloat16 are rounded by the places of their elements. The patience ends it: only the first loss is
    lower by so much.
    """
    words = [
        "precision=fp32", "optimizer=adamw_bf16", "trainer.max_steps=18", "trainer.val_check_interval=3",
        "callbacks.checkpoint_every_n_steps=3", "callbacks.keep_checkpoints=9", "optim.ema_decay=0.8",
        "callbacks.early_stopping_patience=4", "callbacks.early_stopping_min_delta=99",
    ]  # fmt: skip
    train(tmp_path / "one", *MODEL, *BATCH, *words)
    theirs = metrics(tmp_path / "one")
    for i, (strategy, count) in enumerate(LEGS):
        more = [*leg(strategy, count), *words, "run_name=run"] + ["ckpt_path=last"] * (i > 0)
        patch, code = CUT.format(step=3 * i + 3), 1
        if count == 4:
            patch, code = fault(1, 8, "SIGTERM"), 143
        elif i + 1 == len(LEGS):
            patch, code = "", 0
        run(tmp_path, *more, patch=patch, code=code)
        own = metrics(tmp_path / "outputs/run")
        for column in ("train_loss", "grad_norm", "val_loss"):
            expected = {step: theirs[column][step] for step in own.get(column, {})}
            assert own.get(column, {}) == pytest.approx(expected, rel=1e-5), (strategy, count, column)
        assert list(own["train_loss"]) == list(range(1, 3 * i + 4))
    assert list(own["val_loss"]) == list(theirs["val_loss"])
    two, divided, four = (contents(checkpoint(tmp_path / "outputs/run", step)) for step in (3, 6, 9))
    assert divided == two
    assert four["model.safetensors"] == two["model.safetensors"]
    assert four["optimizer.safetensors"] == two["optimizer.safetensors"]
    for folder in (tmp_path / "one", tmp_path / "outputs/run"):
        told = summary(folder)
        assert (told["ended_by"], told["steps"]) == ("callbacks.early_stopping_patience", 15)
    assert difference_of_averages(*(checkpoint(tmp_path / name, 15) for name in ("outputs/run", "one"))) < 0.01


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
    output = run(
        tmp_path, *DIVIDED, *words, "precision=fp32", "micro_batch_size=4", "run_name=run", patch=OUT_OF_MEMORY
    )
    assert "micro_batch_size 2 instead of 4" in output
    assert "micro_batch_size 1 instead of 2" in output
    own, small = metrics(tmp_path / "outputs/run"), metrics(tmp_path / "small")
    for column in ("train_loss", "val_loss", "grad_norm"):
        assert own[column] == pytest.approx(small[column], rel=1e-6), column


# Rank 1 alone has no memory, after what its second micro-batch has exchanged. Then rank 0 waits, as for its GPU.
APART = """
from contextlib import contextmanager
import threading
import torch
from gpt2_fp8.engine.attempts import Attempts
from gpt2_fp8.engine.sharded import Sharded
from gpt2_fp8.runtime import rendezvous
from gpt2_fp8.train.fit import Training

part, fill, rendezvous.GRACE_SECONDS, begun = Sharded.part, Training.fill_summary, 1.0, []
rank = os.environ.get("RANK")

@contextmanager
def failing(self, last):
    begun.append(last)
    with part(self, last):
        yield
    if rank == "1" and len(begun) == 4:
        Path("failed").touch()
        raise torch.OutOfMemoryError("CUDA out of memory")

def waiting(self, *_):
    if threading.current_thread() is threading.main_thread():
        time.sleep(600)
    fill(self)

def at_pythons_end(code):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

Sharded.part = failing
if rank == "0":
    {waits}
"""
WAITS = [
    "Training.fill_summary = waiting",
    "sys.exit, rendezvous.Meeting.watch = at_pythons_end, lambda *_: None",
    "Attempts._discard, rendezvous.Meeting.watch = waiting, lambda *_: None",
]


@pytest.mark.parametrize("waits", WAITS, ids=["summary", "end", "discard"])
def test_out_of_memory_on_one_rank_is_said_once_and_ends_one_whose_gpu_waits(tmp_path, waits):
    output = run(tmp_path, *DIVIDED, *FEW, "run_name=run", patch=APART.replace("{waits}", waits), timeout=150, code=2)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 20
    assert output.count("out of memory on rank 1 alone with micro_batch_size=2") == 1, output
    assert "Traceback" not in output
    assert summary(tmp_path / "outputs/run")["status"] == "refused"


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


def test_a_loss_that_is_not_finite_on_one_rank_is_run_again_on_both(tmp_path):
    run(tmp_path, *DIVIDED, *FEW, *EMULATED, "recipe=delayed", "run_name=run", patch=NAN)
    assert summary(tmp_path / "outputs/run")["status"] == "completed"
    assert metrics(tmp_path / "outputs/run")["bf16_reruns"][6] == 1

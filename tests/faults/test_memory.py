"""Out of memory in training, in validation, in the way to bf16, on one rank: of an engine with little room."""

import re

import pytest
import torch

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.engine.gradients import Gradients
from tests import ranks
from tests.runs import checkpoint, metrics, record_steps, recorded, train

STEPS = ["trainer.max_steps=6", "trainer.val_check_interval=3", "callbacks.checkpoint_every_n_steps=2"]
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"


def room_for(monkeypatch, training=None, validation=None, from_step=0, in_backward=False):
    """Have the engine's loss end in an error for more sequences than that; returns the sizes that it was asked for."""
    loss, seen, done = Gradients.loss, [], {"forwards": 0}

    def limited(self, ids, is_first_microbatch=None, scale=1.0):
        training_now = torch.is_grad_enabled()
        seen.append((training_now, len(ids)))
        limit = training if training_now else validation
        late = done["forwards"] < from_step
        done["forwards"] += training_now
        if limit is None or len(ids) <= limit or late:
            return loss(self, ids, is_first_microbatch, scale)
        if in_backward:
            return Fails.apply(loss(self, ids, is_first_microbatch, scale))
        raise torch.OutOfMemoryError(TEXT)

    monkeypatch.setattr(Gradients, "loss", limited)
    return seen


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError(TEXT)


def tokens(steps):
    return [(step, hashed) for step, hashed, _ in steps]


def losses(steps):
    return [float.fromhex(loss) for _, _, loss in steps]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("clean") / "run", *STEPS)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_64_training_goes_on_in_smaller_micro_batches(tmp_path, monkeypatch, caplog, clean, in_backward):
    steps = record_steps(monkeypatch)
    seen = room_for(monkeypatch, training=2, from_step=4, in_backward=in_backward)  # two steps of 4 + 4 before
    train(tmp_path / "run", *STEPS)
    assert [size for training, size in seen if training] == [4] * 5 + [2] * 16
    assert tokens(steps) == tokens(clean[0])
    assert losses(steps) == pytest.approx(losses(clean[0]), rel=1e-5)
    own, theirs = metrics(tmp_path / "run"), clean[1]
    for column in ("lr", "tokens"):
        assert own[column] == theirs[column]
    said = [r.message for r in caplog.records if "out of memory" in r.message]
    assert len(said) == 1
    assert "micro_batch_size 2 instead of 4" in said[0]


def test_64_auto_begins_with_a_whole_share_and_finds_what_fits(tmp_path, monkeypatch, clean):
    steps = record_steps(monkeypatch)
    seen = room_for(monkeypatch, training=3)
    train(tmp_path / "run", *STEPS, "micro_batch_size=auto")
    assert [size for training, size in seen if training][:6] == [8, 4, 2, 2, 2, 2]
    assert tokens(steps) == tokens(clean[0])
    assert losses(steps) == pytest.approx(losses(clean[0]), rel=1e-5)


RANKS = """
import torch
from gpt2_fp8.engine.attempts import Attempts
from gpt2_fp8.engine.gradients import Gradients
from tests.faults.test_memory import Fails

make, of_step, loss, at = Attempts.make, Gradients.of_step, Gradients.loss, {}
# By step: the ranks that have room for so many sequences, from which pass on. It happens in the last micro-batch.
FAULTS = {2: ([1], 8, "forward"), 3: ([1], 4, "backward"), 4: ([0, 1], 2, "forward"), 5: ([0, 1], 1, "backward")}

def made(self, ids, done, **more):
    at["step"] = done + 1
    return make(self, ids, done, **more)

def begun(self, ids, size):
    at["left"] = len(ids) // size
    return of_step(self, ids, size)

def limited(self, ids, first=None, scale=1.0):
    found = loss(self, ids, first, scale)
    ranks, room, where = FAULTS.get(at["step"], ([], 0, ""))
    at["left"] -= torch.is_grad_enabled()
    if not torch.is_grad_enabled() or torch.distributed.get_rank() not in ranks or len(ids) <= room or at["left"]:
        return found
    if where == "backward":
        return Fails.apply(found)
    raise torch.OutOfMemoryError("CUDA out of memory")

Attempts.make, Gradients.of_step, Gradients.loss = made, begun, limited
"""


def test_65_one_rank_or_all_make_all_of_them_halve(tmp_path):
    words = [*STEPS, "global_batch_size=32"]
    output = ranks.run(tmp_path, *ranks.TWO, *words, "micro_batch_size=16", "run_name=ranks", patch=RANKS)
    told = re.findall(r"micro_batch_size (\d+) instead of", output)
    assert told == ["8", "8", "4", "4", "2", "2", "1", "1"], "by both ranks"
    train(tmp_path / "one", *words, "micro_batch_size=1")
    own, theirs = metrics(tmp_path / "outputs/ranks"), metrics(tmp_path / "one")
    for column in ("train_loss", "val_loss", "grad_norm", "lr"):
        assert own[column] == pytest.approx(theirs[column], rel=1e-5), column


def test_66_validation_has_a_size_of_its_own(tmp_path, monkeypatch, caplog, clean):
    steps = record_steps(monkeypatch)
    seen = room_for(monkeypatch, validation=1)
    train(tmp_path / "run", *STEPS)
    assert {size for training, size in seen if training} == {4}
    assert [size for training, size in seen if not training] == [4, 2, *[1] * 8, *[1] * 8]
    assert steps == clean[0], "training has not noticed"
    assert metrics(tmp_path / "run")["val_loss"] == pytest.approx(clean[1]["val_loss"], rel=1e-6)
    assert sum("the batch of a validation" in record.message for record in caplog.records) == 2


def test_67_a_single_sequence_that_does_not_fit_ends_with_advice(tmp_path, monkeypatch):
    room_for(monkeypatch, training=0, from_step=6)  # after three steps
    with pytest.raises(UserError) as ended:
        train(tmp_path / "run", *STEPS)
    assert ended.value.exit_code == 2
    assert "micro_batch_size=1" in str(ended.value)
    assert "activation_checkpointing=full" in str(ended.value)
    assert checkpoint(tmp_path / "run", 2).is_dir(), "what was saved stays"

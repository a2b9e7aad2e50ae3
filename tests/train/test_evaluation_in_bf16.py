"""`precision.evaluation=bf16`: a run in FP8 is judged as its exported weights will be, and trained as without it."""

import json

import pytest
import torch

from gpt2_fp8 import evaluate
from gpt2_fp8.train.module import logits
from tests import runs as small
from tests.runs import EMULATED_FP8, checkpoint, metrics, record_steps, recorded, summary, train, train_until

IN_BF16 = EMULATED_FP8  # as a new run is validated
FP8 = [*IN_BF16, "precision.evaluation=fp8"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The steps and the log of a run, validated in either precision, and the folder of both."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: recorded(folder / name, *words) for name, words in (("fp8", FP8), ("bf16", IN_BF16))}, folder


def test_the_training_is_the_same_and_validations_are_not(runs):
    found, folder = runs
    assert found["fp8"][0] == found["bf16"][0]
    ours, theirs = (found[name][1]["val_loss"] for name in ("bf16", "fp8"))
    assert list(ours) == list(theirs) == [5, 10, 12]
    for step, loss in ours.items():
        assert loss != theirs[step]
        assert loss == pytest.approx(theirs[step], rel=2e-3)
    assert summary(folder / "bf16")["config"]["precision"]["evaluation"] == "bf16"


EMULATED = ["precision=fp8_hybrid", "precision.backend=emulated", "recipe=block"]
IN_FP8 = "FP8 emulated in plain torch"
EVALUATED = [
    ([], "bf16", "plain torch, in bf16"), (["precision=bf16"], "bf16", "plain torch"),
    (["precision.fallback=error"], "bf16", "plain torch, in bf16"), (EMULATED, "fp8_hybrid", IN_FP8),
    ([*EMULATED, "precision.evaluation=bf16"], "bf16", "plain torch, in bf16"),
    (["recipe=current"], "fp8_hybrid", IN_FP8),
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected", "layers"), EVALUATED)
def test_evaluate_finds_the_runs_loss_unless_fp8_is_named(runs, tmp_path, monkeypatch, words, expected, layers):
    monkeypatch.chdir(tmp_path)
    folder = runs[1] / "bf16"
    assert evaluate.main([f"ckpt_path={folder}", "out=result.json", *words]) == 0
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["evaluation"], found["kernels"]["layers"]) == (expected, layers)
    assert (found["loss"] == summary(folder)["last_val_loss"]) == (expected == "bf16")


def test_a_run_in_legs_ends_as_one_in_a_piece(runs, tmp_path, monkeypatch):
    """Though it was validated in FP8 before."""
    found, folder = runs
    steps = record_steps(monkeypatch)
    train_until(8, tmp_path / "legs", *FP8)
    train(tmp_path / "legs", "ckpt_path=last", *IN_BF16)
    assert steps == found["bf16"][0]
    small.assert_same_checkpoint(checkpoint(tmp_path / "legs", 12), checkpoint(folder / "bf16", 12))
    ours, once = metrics(tmp_path / "legs")["val_loss"], found["bf16"][1]["val_loss"]
    assert [ours[step] for step in (10, 12)] == [once[step] for step in (10, 12)]
    assert ours[5] != once[5]


def evaluated(step):
    step.model.eval()
    found = step.evaluation.sums(small.IDS_OF_BYTES)
    step.model.train()
    return found


def test_no_scale_is_needed_or_found():
    step, plain = small.training_step(*IN_BF16), small.training_step("precision=bf16")
    assert torch.equal(evaluated(step), evaluated(plain))
    assert torch.equal(logits(step, small.IDS_OF_BYTES[:, :7], 256), logits(plain, small.IDS_OF_BYTES[:, :7], 256))
    assert not step.scaling.ready

"""`precision.bf16_last_steps`: a run in FP8 whose last steps compute in bf16, as one that is continued so by hand."""

import csv

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.checkpoint.files import read
from gpt2_fp8.config.errors import UserError
from tests import runs
from tests.runs import EMULATED_FP8, SMALL, assert_equal, checkpoint, metrics, record_steps, train, train_until

LAST = [*EMULATED_FP8, "precision.bf16_last_steps=4", "callbacks.keep_checkpoints=4"]  # of twelve


@pytest.fixture(scope="module")
def last(tmp_path_factory):
    """The steps and the folder of a run whose steps 9 to 12 are in bf16."""
    folder = tmp_path_factory.mktemp("last") / "run"
    return runs.recorded(folder, *LAST)[0], folder


def test_it_is_a_run_that_is_continued_in_bf16(last, tmp_path, monkeypatch):
    steps, folder = last
    by_hand = record_steps(monkeypatch)
    train_until(8, tmp_path, *EMULATED_FP8)
    train(tmp_path, "precision=bf16", "model.dropout=0.1", "ckpt_path=last")
    assert by_hand == steps
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "rng"):
        ours, theirs = (read(checkpoint(of, 12))[part] for of in (folder, tmp_path))
        assert_equal(ours, theirs, part)
    assert metrics(folder)["val_loss"][12] == metrics(tmp_path)["val_loss"][12]
    assert {*metrics(folder)["bf16_reruns"].values(), *metrics(folder)["skipped_steps"].values()} == {0}


@pytest.mark.parametrize("until", [8, 11])
def test_a_run_in_legs_ends_as_one_in_a_piece(last, tmp_path, monkeypatch, caplog, until):
    steps, folder = last
    here = record_steps(monkeypatch)
    words = [*LAST, "callbacks.checkpoint_every_n_steps=1"]
    train_until(until, tmp_path, *words)
    train(tmp_path, *words, "ckpt_path=last")
    assert here == steps
    runs.assert_same_checkpoint(checkpoint(tmp_path, 12), checkpoint(folder, 12))
    ours, theirs = (read(checkpoint(of, 12))["training_step"] for of in (tmp_path, folder))
    assert_equal(ours, theirs, "scales and sizes")


def test_a_longer_run_is_in_fp8_again_with_the_scales_of_before(last, tmp_path, monkeypatch, caplog):
    _, folder = last
    before, after = (read(checkpoint(folder, step))["training_step"]["scaling"] for step in (8, 12))
    assert_equal(before, after, "scaling")
    train(tmp_path, *LAST)
    assert runs.summary(tmp_path)["precision"]["last_in_bf16"] == 4
    steps = record_steps(monkeypatch)
    train(tmp_path, *LAST, "ckpt_path=last", "trainer.max_steps=18")
    assert [step for step, *_ in steps] == [*range(13, 19)]
    at_12, at_16, at_18 = (read(checkpoint(tmp_path, step))["training_step"]["scaling"] for step in (12, 16, 18))
    with pytest.raises(AssertionError):
        assert_equal(at_12, at_16, "13 and 14 were in FP8")
    assert_equal(at_16, at_18, "15 and all after it were in bf16")
    assert runs.summary(tmp_path)["config"]["precision"]["bf16_last_steps"] == 4
    assert runs.summary(tmp_path)["precision"]["last_in_bf16"] == 4
    assert sum("in FP8 again" in record.message for record in caplog.records) == 1


def test_the_health_of_fp8_ends_with_its_last_step(last):
    _, folder = last
    assert list(metrics(folder)["fp8/scale_weight"]) == [*range(1, 9)]
    with (folder / "fp8.csv").open(newline="") as file:
        assert {int(row["step"]) for row in csv.DictReader(file)} == {1, 8}


def test_a_run_without_a_step_in_fp8_is_refused():
    with pytest.raises(UserError, match=r"precision\.bf16_last_steps=12"):
        compose.preflight([*SMALL, "precision.bf16_last_steps=12"])

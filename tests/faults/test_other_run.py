"""Faults 13 to 17: continued with another model, other text, another schedule, another number of workers."""

import pytest

from gpt2_fp8.config.errors import UserError
from tests.runs import checkpoint, metrics, record_steps, recorded, summary, train, train_until

SHORT = ["trainer.max_steps=6", "trainer.val_check_interval=6", "callbacks.checkpoint_every_n_steps=2"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of six steps that has ended after four."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    train_until(4, folder, *SHORT)
    return checkpoint(folder, 4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run in one piece: its steps, and its log."""
    return recorded(tmp_path_factory.mktemp("whole") / "run", *SHORT)


def refused(tmp_path, begun, *overrides):
    with pytest.raises(UserError) as error:
        train(tmp_path / "other", *SHORT, f"ckpt_path={begun}", *overrides)
    assert not (tmp_path / "other/checkpoints").exists() or not list((tmp_path / "other/checkpoints").glob("step-*"))
    return str(error.value)


def test_13_another_model_is_refused_with_every_difference(tmp_path, begun):
    said = refused(tmp_path, begun, "model.n_head=4", "model.bias=false")
    assert "model.n_head is 2 there, 4 here" in said
    assert "model.bias is True there, False here" in said
    assert "model.n_layer is 1 there, 2 here" in refused(tmp_path, begun, "model.n_layer=2")


def test_13_a_head_count_that_changes_no_shape_is_refused(tmp_path, begun):
    assert "model.n_head is 2 there, 8 here" in refused(tmp_path, begun, "model.n_head=8")


def test_14_another_tokenizer_is_refused(tmp_path, begun):
    from gpt2_fp8.data import datamodule

    with pytest.MonkeyPatch.context() as patch:  # of the same size
        patch.setattr(datamodule, "fingerprint", lambda tokenizer: "merges of another text")
        assert "tokenizer" in refused(tmp_path, begun)


@pytest.mark.parametrize(
    ("override", "named"),
    [("data.seed=7", "seed"), ("model.n_positions=16", "n_positions"), ("global_batch_size=4", "global_batch_size")],
)
def test_15_other_text_is_refused(tmp_path, begun, override, named):
    assert named in refused(tmp_path, begun, override)


def test_16_another_length_and_schedule_are_taken(tmp_path, begun):
    longer = ["trainer.max_steps=8", "trainer.val_check_interval=8", "optim.lr=1e-3"]
    train(tmp_path / "longer", *SHORT, f"ckpt_path={begun}", *longer)
    train(tmp_path / "new", *SHORT, *longer)
    assert summary(tmp_path / "longer")["steps"] == 8
    expected = metrics(tmp_path / "new")["lr"]
    assert metrics(tmp_path / "longer")["lr"] == {step: expected[step] for step in range(5, 9)}


@pytest.mark.parametrize("override", ["data.num_workers=2", "micro_batch_size=2"])
def test_17_another_number_of_workers_or_micro_batch_loses_and_repeats_nothing(
    tmp_path, begun, whole, monkeypatch, override
):  # of ranks: tests/test_ddp.py
    steps = record_steps(monkeypatch)
    train(tmp_path / "run", *SHORT, f"ckpt_path={begun}", override)
    assert [step[:2] for step in steps] == [step[:2] for step in whole[0][4:]]
    losses = [float.fromhex(step[2]) for step in steps]
    assert losses == pytest.approx([float.fromhex(step[2]) for step in whole[0][4:]], rel=1e-5)

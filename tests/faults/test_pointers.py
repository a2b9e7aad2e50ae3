"""Faults 105 and 106: a bit of a pointer or of a note that turned, and folders that bear each other's names."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from gpt2_fp8.checkpoint import files, find, pointers
from gpt2_fp8.checkpoint.errors import CheckpointError
from gpt2_fp8.checkpoint.pointers import VALIDATION, Pointer
from gpt2_fp8.checkpoint.writer import Writer
from tests.runs import checkpoint, metrics, summary, train, train_until

STEPS = ["trainer.max_steps=8", "trainer.val_check_interval=4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of eight steps, with a checkpoint and a validation at 4 and 8."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder, *STEPS)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def flipped(path):
    """Every way in which one bit of a file can be another."""
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


@pytest.mark.parametrize("kind", ["last", "best"])
def test_105_no_bit_of_a_pointer_turns_unnoticed(run, kind):
    folder = run / "checkpoints"
    whole = pointers.follow(folder, kind)
    for data in flipped(folder / f"{kind}.json"):
        (folder / f"{kind}.json").write_bytes(data)
        assert pointers.read(folder, kind) in (whole, None)  # whole: what JSON takes for white space


def test_105_no_bit_of_a_validation_s_note_turns_unnoticed(run):
    path = checkpoint(run, 8)
    whole = pointers.noted(path)
    assert whole == pointers.read(run / "checkpoints", "last")
    for data in flipped(path / VALIDATION):
        (path / VALIDATION).write_bytes(data)
        try:
            assert pointers.noted(path) == whole
        except ValueError:
            continue


def test_105_a_best_that_was_changed_is_found_again_beside_the_checkpoints(run, caplog):
    """One bit makes 1.44 of 5.44, and no validation would ever be the best again."""
    best = pointers.follow(run / "checkpoints", "best")
    turn(run / "checkpoints/best.json", val_loss=1.44)
    with pytest.raises(CheckpointError, match=r"best\.json cannot be used: it was changed after it was written"):
        find.resolve("best", run / "checkpoints")
    train(run, "ckpt_path=last", *STEPS, "trainer.max_steps=9")
    assert "best.json is written again" in caplog.text
    losses = metrics(run)["val_loss"]
    step = min(losses, key=losses.get)
    assert pointers.follow(run / "checkpoints", "best") == Pointer(
        f"step-{step:08d}", step, pytest.approx(losses[step])
    )
    assert best.val_loss >= summary(run)["best_val_loss"] > 2


def turn(path, **values):
    """Change values, as a disk may: no digest follows."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_105_a_note_that_was_changed_has_its_step_validated_once_more(tmp_path, caplog):
    every = ["trainer.max_steps=6", "trainer.val_check_interval=4"]
    train_until(5, tmp_path / "run", *every)
    turn(checkpoint(tmp_path / "run", 4) / VALIDATION, val_loss=0.5)
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "run", *every, "ckpt_path=last")
    assert "validation.json of step-00000004 is not used" in caplog.text
    assert metrics(tmp_path / "run")["val_loss"].keys() == {4, 6}


def test_105_a_note_of_another_checkpoint_is_none_of_this_one(run):
    shutil.copy(checkpoint(run, 4) / VALIDATION, checkpoint(run, 8) / VALIDATION)
    with pytest.raises(ValueError, match="it is of step 4"):
        pointers.noted(checkpoint(run, 8))


def test_105_files_of_an_earlier_version_are_taken_and_said_to_be_unchecked(run, caplog):
    folder, written = run / "checkpoints", {}
    for path in (folder / "last.json", folder / "best.json", checkpoint(run, 8) / VALIDATION):
        value = json.loads(path.read_text())
        written[path] = value = {key: value[key] for key in value if "sha256" not in key}
        path.write_text(json.dumps(value))
    assert find.resolve("last", folder) == checkpoint(run, 8)
    assert find.resolve("best", folder).name == written[folder / "best.json"]["checkpoint"]
    assert pointers.noted(checkpoint(run, 8)).val_loss == written[checkpoint(run, 8) / VALIDATION]["val_loss"]
    for name in ("last.json", "best.json", VALIDATION):
        assert f"{name} is of an earlier version, without digest" in caplog.text
    train(run, "ckpt_path=last", *STEPS, "trainer.max_steps=9")
    assert summary(run)["status"] == "completed"


def test_105_the_best_survives_where_only_notes_are_left(tmp_path):
    writer = Writer(tmp_path, keep=3, asynchronous=False)
    writer.begin(None, None)
    for step, loss in ((1, 3.0), (2, 1.5), (3, 2.0)):
        pointer = Pointer(f"step-{step:08d}", step, loss)
        writer.save({"state_dict": {}, "global_step": step}, pointer)
        writer.note(pointer, better=loss < 3.0 and step == 2)
    turn(tmp_path / "best.json", val_loss=0.0)
    again = Writer(tmp_path, keep=3, asynchronous=False)
    again.begin(3, None)
    assert again.outcome.best == pointers.follow(tmp_path, "best") == Pointer("step-00000002", 2, 1.5)


def test_106_folders_that_bear_each_other_s_names_are_refused(run):
    four, eight, aside = checkpoint(run, 4), checkpoint(run, 8), run / "aside"
    four.rename(aside), eight.rename(four), aside.rename(eight)
    for path, step, named in ((four, 8, 4), (eight, 4, 8)):
        with pytest.raises(
            CheckpointError, match=f"it is of step {step}, by its manifest.json, and its name is that of"
        ):
            files.read(path)
        assert not files.is_checkpoint(path)
        assert pointers.step_of(path.name) == named
    with pytest.raises(CheckpointError, match="no whole checkpoint left") as refused:
        train(run, "ckpt_path=last", *STEPS)
    assert refused.value.exit_code == 2


def test_106_one_of_another_name_than_a_step_s_is_taken(run, tmp_path):
    path = Path(shutil.copytree(checkpoint(run, 8), tmp_path / "kept"))
    assert files.read(path)["global_step"] == 8


def test_106_a_folder_in_another_s_place_is_not_what_the_pointer_means(run, tmp_path, caplog):
    """Of the same step, whole, and another run's."""
    train(tmp_path / "other", *STEPS, "seed=7")
    shutil.rmtree(checkpoint(run, 8))
    shutil.copytree(checkpoint(tmp_path / "other", 8), checkpoint(run, 8))
    with pytest.raises(ValueError, match="it means another step-00000008 than is there"):
        pointers.follow(run / "checkpoints", "last")
    assert find.resolve("last", run / "checkpoints") == checkpoint(run, 8)
    assert "last.json is skipped: it means another step-00000008" in caplog.text


def test_106_digits_of_other_scripts_name_no_step():
    assert pointers.step_of("step-٠٠٠٠٠٠٠٤") is None

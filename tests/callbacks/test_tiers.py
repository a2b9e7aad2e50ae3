"""What stays on the disk: retention, pointers, full disks, branches left behind."""

import errno
import json
import logging
import math
import os
import shutil

import pytest
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import At, run

from gpt2_fp8.checkpoint import files, find, pointers
from gpt2_fp8.config.errors import RunError


def saved(folder):
    return list(pointers.steps(folder / "checkpoints"))


def test_the_newest_few_and_the_best_stay(tmp_path):
    val_losses = {4: 3.0, 8: 1.0, 12: 2.0, 16: 2.0, 20: 5.0}
    run(tmp_path, max_steps=20, every=2, keep=2, val_losses=val_losses)
    folder = tmp_path / "checkpoints"
    assert saved(tmp_path) == [8, 18, 20]
    assert pointers.read(folder, "best") == pointers.Pointer("step-00000008", 8, 1.0)
    assert pointers.read(folder, "last") == pointers.Pointer("step-00000020", 20, 5.0)
    assert json.loads((folder / "best.json").read_text()) == {"checkpoint": "step-00000008", "step": 8, "val_loss": 1.0}
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["best.json", "last.json"]
    assert find.resolve("best", folder) == folder / "step-00000008"


def test_zero_interval_keeps_the_end_alone(tmp_path):
    run(tmp_path, max_steps=3, every=0, keep=1)
    assert saved(tmp_path) == [3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_such_loss_becomes_the_best(tmp_path, bad):
    run(tmp_path, max_steps=12, every=6, val_losses={4: bad, 8: 2.0, 12: bad})
    assert pointers.read(tmp_path / "checkpoints", "best") == pointers.Pointer("step-00000008", 8, 2.0)
    assert pointers.read(tmp_path / "checkpoints", "last") == pointers.Pointer("step-00000012", 12, None)
    assert saved(tmp_path) == [6, 8, 12]


def test_without_a_finite_loss_there_is_no_best(tmp_path):
    run(tmp_path, max_steps=4, val_losses={4: math.nan})
    assert pointers.read(tmp_path / "checkpoints", "best") is None


def test_a_resumed_run_remembers_its_best(tmp_path):
    val_losses = {4: 1.0, 8: 2.0, 12: 2.0}
    run(tmp_path, max_steps=6, keep=1, val_losses=val_losses)
    (tmp_path / "checkpoints" / "best.json").unlink()  # the state in the checkpoint brings it back
    _, _, tiers = run(tmp_path, max_steps=12, keep=1, val_losses=val_losses)
    assert tiers.best == pointers.read(tmp_path / "checkpoints", "best") == pointers.Pointer("step-00000004", 4, 1.0)
    assert saved(tmp_path) == [4, 12]


def test_continuing_another_run_leaves_its_folder_alone_and_starts_a_best_of_its_own(tmp_path):
    run(tmp_path / "one", max_steps=6, val_losses={4: 1.0})
    before = sorted(tmp_path.glob("one/checkpoints/**/*"))
    source = tmp_path / "one" / "checkpoints" / "step-00000004"
    run(tmp_path / "two", max_steps=12, keep=1, val_losses={8: 5.0, 12: 6.0}, ckpt_path=str(source))
    assert sorted(tmp_path.glob("one/checkpoints/**/*")) == before
    assert saved(tmp_path / "two") == [8, 12]
    assert pointers.read(tmp_path / "two" / "checkpoints", "best").step == 8


def test_later_checkpoints_of_a_branch_left_behind_are_not_taken_for_newer(tmp_path):
    run(tmp_path, max_steps=10, every=2, keep=5, val=100)
    run(tmp_path, max_steps=5, every=1, keep=2, val=100, ckpt_path=str(tmp_path / "checkpoints" / "step-00000002"))
    assert saved(tmp_path) == [4, 5, 6, 8, 10]
    assert pointers.read(tmp_path / "checkpoints", "last").step == 5
    assert find.resolve("last", tmp_path / "checkpoints").name == "step-00000005"


def test_the_resume_source_stays_until_it_is_superseded(tmp_path):
    run(tmp_path, max_steps=4, keep=1, val=100)
    seen = []
    look = At("on_train_batch_start", 5, lambda: seen.append(saved(tmp_path)))
    run(tmp_path, max_steps=6, keep=1, val=100, callbacks=[look])
    assert seen == [[4]]
    assert saved(tmp_path) == [6]


def fail_for(monkeypatch, steps):
    """Have the disk be full whenever one of `steps` is written."""
    write = files.write

    def full(path, checkpoint):
        if checkpoint["global_step"] in steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, checkpoint)

    monkeypatch.setattr(files, "write", full)


def test_a_full_disk_costs_checkpoints_and_not_the_run(tmp_path, monkeypatch, caplog):
    fail_for(monkeypatch, {4, 6})
    with caplog.at_level(logging.WARNING, "gpt2_fp8"):
        module, _, tiers = run(tmp_path, max_steps=8, val_losses={4: 1.0, 8: 2.0})
    assert len(module.losses) == 8
    assert [record.message for record in caplog.records if "could not be saved" in record.message] == [
        "step 4 could not be saved, training goes on: [Errno 28] No space left on device"
    ]
    assert saved(tmp_path) == [2, 8]
    assert tiers.best.step == 8  # step 4 was better, but there is no file of it


def test_an_end_that_cannot_be_saved_is_an_error_and_the_last_good_one_stays(tmp_path, monkeypatch):
    fail_for(monkeypatch, {8})
    with pytest.raises(RunError, match="step 8"):
        run(tmp_path, max_steps=8, val=100)
    assert find.resolve("last", tmp_path / "checkpoints").name == "step-00000006"


def test_what_a_killed_writer_left_is_swept_at_the_start(tmp_path):
    run(tmp_path, max_steps=4, val=100)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000004", folder / ".step-00000006.tmp")
    os.rename(folder / "step-00000004", folder / ".step-00000004.old")  # killed between the two renames
    assert find.resolve("last", folder) == folder / ".step-00000004.old"
    module, _, _ = run(tmp_path, max_steps=5, every=0, keep=9, val=100)
    assert list(module.losses) == [5]
    assert sorted(path.name for path in folder.iterdir()) == [
        "last.json",
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]


def test_the_logs_are_on_the_disk_before_a_pointer_moves(tmp_path, monkeypatch):
    write, seen = pointers.write, {}

    def look(folder, kind, pointer):
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        scalars = events.Scalars("direct") if "direct" in events.Tags()["scalars"] else []
        seen.setdefault(pointer.step, [event.step for event in scalars])
        write(folder, kind, pointer)

    class Direct(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.loggers[0].log_metrics({"direct": 1.0}, step=trainer.global_step)

    monkeypatch.setattr(pointers, "write", look)
    run(tmp_path, max_steps=4, every=2, val=100, callbacks=[Direct()])
    assert seen == {2: [1, 2], 4: [1, 2, 3, 4]}


def test_a_finished_run_still_knows_its_best(tmp_path):
    run(tmp_path, max_steps=8, val_losses={4: 2.0, 8: 1.0})
    module, _, tiers = run(tmp_path, max_steps=8)
    assert module.losses == {}
    assert tiers.best == pointers.Pointer("step-00000008", 8, 1.0)

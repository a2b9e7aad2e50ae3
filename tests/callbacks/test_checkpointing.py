"""What stays on the disk: retention, pointers, full disks, branches left behind."""

import errno
import json
import sys
import threading
import time
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt2_fp8.callbacks.checkpointing import Checkpointing
from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.writer import Writer
from tests.callbacks.tiny_run import At, fail_for, run, two_ranks


def saved(folder):
    return list(pointers.steps(folder / "checkpoints"))


def best_of(folder):
    return pointers.read(folder / "checkpoints", "best")


BOTH = pytest.mark.parametrize("asynchronous", [True, False], ids=["in a thread", "in the step"])


def test_the_newest_few_and_the_best_stay(tmp_path):
    val_losses = {4: 3.0, 8: 1.0, 12: 2.0, 16: 2.0, 20: 5.0}
    run(tmp_path, max_steps=20, every=2, keep=2, val_losses=val_losses)
    folder = tmp_path / "checkpoints"
    assert saved(tmp_path) == [8, 18, 20]
    assert pointers.read(folder, "best") == Pointer("step-00000008", 8, 1.0)
    assert pointers.read(folder, "last") == Pointer("step-00000020", 20, 5.0)
    best = {"checkpoint": "step-00000008", "step": 8, "val_loss": 1.0}
    assert json.loads((folder / "best.json").read_text()) == best
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["best.json", "last.json"]
    assert pointers.resolve("best", folder) == folder / "step-00000008"


def test_a_resumed_run_remembers_its_best(tmp_path):
    val_losses = {4: 1.0, 8: 2.0, 12: 2.0}
    run(tmp_path, max_steps=6, keep=1, val_losses=val_losses)
    (tmp_path / "checkpoints" / "best.json").unlink()  # the state in the checkpoint brings it back
    _, _, tiers = run(tmp_path, max_steps=12, keep=1, val_losses=val_losses)
    assert tiers.tracker.best == best_of(tmp_path) == Pointer("step-00000004", 4, 1.0)
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
    assert pointers.resolve("last", tmp_path / "checkpoints").name == "step-00000005"


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
    assert {step: logged[:step] for step, logged in seen.items()} == {2: [1, 2], 4: [1, 2, 3, 4]}


def test_those_of_every_so_many_steps_are_taken_and_stay_for_good(tmp_path):
    run(tmp_path, max_steps=14, every=2, keep=1, val=100, keep_every_n_steps=5)
    assert saved(tmp_path) == [5, 10, 14]


def test_the_clock_is_asked_every_ten_steps_and_starts_again_with_each_checkpoint(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: -1e9)  # set back by somebody: nobody here looks

    class Tick(Callback):
        def on_train_batch_start(self, *_):
            now[0] += 6.0  # seconds

    run(tmp_path, max_steps=45, every=0, keep=9, val=100, every_minutes=1.7, callbacks=[Tick()])
    assert saved(tmp_path) == [20, 40, 45]  # 120 s after the start, and 120 s after that; 60 s are too few


@BOTH
def test_the_longest_stall_is_known(tmp_path, monkeypatch, asynchronous):
    """What the step waits for: the copy and the hand-over, or all of the writing."""
    now, save, write = [0.0], Writer.save, files.write
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def slow_save(self, checkpoint, pointer):
        now[0] += {2: 1.0, 4: 3.0, 6: 2.0}[pointer.step]
        save(self, checkpoint, pointer)
        self.wait()

    def slow_write(path, checkpoint):
        if not asynchronous:  # in a thread it takes its time beside the steps, which no clock of a test shows
            now[0] += 10.0
        write(path, checkpoint)

    monkeypatch.setattr(Writer, "save", slow_save)
    monkeypatch.setattr(files, "write", slow_write)
    assert Checkpointing(tmp_path, 2, 1).longest_stall is None
    _, _, tiers = run(tmp_path, max_steps=6, val=100, asynchronous=asynchronous)
    assert tiers.longest_stall == (3.0 if asynchronous else 13.0)


def test_a_best_that_could_not_be_written_is_forgotten_when_that_is_known(tmp_path, monkeypatch):
    """Step 4 is in the writer's hands when 8 is validated: 8 is compared with what is on the disk, not with a hope."""
    fail_for(monkeypatch, {4})
    slow, failing = threading.Event(), files.write

    def write(path, checkpoint):
        if checkpoint["global_step"] == 4:
            slow.wait(10)
        failing(path, checkpoint)

    monkeypatch.setattr(files, "write", write)
    hold = At("on_validation_start", 8, slow.set)
    _, _, tiers = run(tmp_path, max_steps=9, every=0, val_losses={4: 1.0, 8: 2.0}, callbacks=[hold])
    assert slow.is_set()
    assert tiers.tracker.best == best_of(tmp_path) == Pointer("step-00000008", 8, 2.0)


def test_a_best_that_is_being_written_is_waited_for(tmp_path, monkeypatch):
    gate, write = threading.Event(), files.write

    def slow(path, checkpoint):
        if checkpoint["global_step"] == 4:
            gate.wait(10)
            time.sleep(0.3)  # until after the validation of step 8, which is what has to wait
        write(path, checkpoint)

    monkeypatch.setattr(files, "write", slow)
    hold = At("on_validation_start", 8, gate.set)
    _, _, tiers = run(tmp_path, max_steps=9, every=0, val_losses={4: 1.0, 8: 2.0}, callbacks=[hold])
    assert tiers.tracker.best == best_of(tmp_path) == Pointer("step-00000004", 4, 1.0)


def test_an_end_that_fails_once_is_tried_again(tmp_path, monkeypatch):
    write, failures = files.write, [OSError(errno.ENOSPC, "No space left on device")]

    def once(path, checkpoint):
        if checkpoint["global_step"] == 6 and failures:
            raise failures.pop()
        write(path, checkpoint)

    monkeypatch.setattr(files, "write", once)
    _, _, tiers = run(tmp_path, max_steps=6, val=100)
    assert (tiers.tracker.saved_step, failures) == (6, [])
    assert pointers.resolve("last", tmp_path / "checkpoints").name == "step-00000006"


def test_a_state_that_no_checkpoint_can_keep_ends_the_run_at_the_next_step(tmp_path):
    class Odd(Callback):
        def state_dict(self):
            return {"a set": {1}}

    for asynchronous in (True, False):
        with pytest.raises(TypeError, match="a set"):
            run(tmp_path, max_steps=8, val=100, callbacks=[Odd()], asynchronous=asynchronous)


def test_what_is_saved_after_the_exception_is_written_too(tmp_path):
    """GracefulStop does so where a signal ends the wait for a step's data; its `on_exception` may come later."""

    class Late(Checkpoint):
        def on_exception(self, trainer, *_):
            assert trainer.global_step == 3
            (tiers,) = (callback for callback in trainer.callbacks if isinstance(callback, Checkpointing))
            assert tiers.save(trainer)

    def fall():
        raise RuntimeError("in the step")

    late = [At("on_train_batch_start", 3, fall), Late()]
    with pytest.raises(RuntimeError, match="in the step"):
        run(tmp_path, val=100, callbacks=late)
    assert files.read(pointers.resolve("last", tmp_path / "checkpoints"))["global_step"] == 3


def test_a_best_that_was_written_anew_is_what_it_is_now(tmp_path):
    run(tmp_path, max_steps=8, keep=9, val_losses={4: 2.0, 8: 1.0})
    source = str(tmp_path / "checkpoints" / "step-00000004")
    run(tmp_path, max_steps=8, keep=9, val_losses={8: 5.0}, ckpt_path=source)
    assert best_of(tmp_path) == Pointer("step-00000008", 8, 5.0)


RANK = f"""
import errno, json, os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.callbacks.tiny_run import At, run
from gpt2_fp8.checkpoint import files
write = files.write
def full(path, checkpoint):
    if checkpoint["global_step"] in (4, 6):
        raise OSError(errno.ENOSPC, "No space left on device")
    write(path, checkpoint)
files.write = full
losses = dict(zip((4, 8, 12), (1.0, 2.0, 3.0) if os.environ["RANK"] == "0" else (9.0, 8.0, 7.0)))
_, _, tiers = run(sys.argv[1], max_steps=12, every=3, ranks=2, every_minutes=1e-9, val_losses=losses)
known = tiers.tracker
print(json.dumps([known.saved_step, known.best.step, known.best.val_loss, known.requested_step]))
"""


def test_two_ranks_know_the_same_and_never_wait_for_each_other_in_vain(tmp_path):
    """Saves by steps, by the clock, at the best and at the end; some fail, on the rank that writes alone."""
    _, outputs = two_ranks([sys.executable, "-c", RANK, str(tmp_path)])
    known = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert known[0] == known[1], outputs
    assert known[0] == [12, 8, 2.0, 12]
    assert saved(tmp_path) == [8, 9, 10, 12]
    assert "step 4 could not be saved" in outputs[0][1]
    assert "could not be saved" not in outputs[1][1]

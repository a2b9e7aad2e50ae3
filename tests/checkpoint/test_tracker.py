"""What ranks know of checkpoints and validations: two trackers, of which one has a writer that writes."""

import errno
import threading

import pytest
import torch

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.tracker import CheckpointTracker, is_validation_due
from gpt2_fp8.checkpoint.writer import Writer


class Ranks:
    """Rank 0 and rank 1, which do everything together."""

    def __init__(self, folder):
        self.zero, self.one = (CheckpointTracker(Writer(folder, keep=2)) for _ in range(2))
        self.zero.writer.begin(None, None)
        self.together("sync")

    def together(self, method, value=(None, None)):
        """`share` or `sync` on both; returns what each gets."""
        sent = []
        first = getattr(self.zero, method)(lambda own: sent.append(own) or own, value[0])
        return first, getattr(self.one, method)(lambda own: sent[0], value[1])

    def save(self, step):
        for rank in (self.zero, self.one):
            rank.requested_step = step
        self.zero.writer.save({"state_dict": {"w": torch.ones(3)}, "global_step": step}, at(step))
        self.together("share")

    def validate(self, step, loss, saved=True):
        return [rank.add_validation(step, loss, lambda: saved) for rank in (self.zero, self.one)]

    def known(self):
        zero, one = ((rank.requested_step, rank.saved_step, rank.best) for rank in (self.zero, self.one))
        assert zero == one
        return zero


def at(step, val_loss=None):
    return Pointer(pointers.folder_name(step), step, val_loss)


@pytest.fixture
def ranks(tmp_path):
    made = Ranks(tmp_path / "c")
    yield made
    made.zero.writer.close()


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_checkpoint_counts_as_requested_until_it_is_known_to_be_saved(ranks, monkeypatch):
    gate, write = threading.Event(), files.write
    monkeypatch.setattr(files, "write", lambda *given: gate.wait(30) and write(*given))
    ranks.save(3)
    assert ranks.known() == (3, None, None)
    gate.set()
    ranks.zero.writer.wait()
    assert ranks.together("sync", (1.5, 9.0)) == (1.5, 1.5)
    assert ranks.known() == (3, 3, None)


def test_one_that_could_not_be_written_is_requested_again(ranks, monkeypatch):
    ranks.save(3)
    ranks.zero.writer.wait()
    for fails in (True, False):
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(files, "write", full)
            ranks.save(4)
            ranks.zero.writer.wait()
        ranks.together("share")
        assert ranks.known() == ((3, 3, None) if fails else (4, 4, None))


def test_the_best_is_a_hope_until_it_is_on_the_disk(ranks, monkeypatch):
    ranks.save(3)
    assert ranks.validate(3, 2.0) == [True, True]
    assert ranks.zero.is_best_pending()
    ranks.zero.writer.note(at(3, 2.0), True)
    ranks.zero.writer.wait()
    assert not ranks.zero.is_best_pending()
    ranks.together("sync")
    assert ranks.known() == (3, 3, at(3, 2.0))
    assert ranks.validate(4, 1.0, saved=False) == [False, False]
    assert ranks.known()[2] == at(3, 2.0)
    monkeypatch.setattr(files, "write", full)
    ranks.save(5)
    assert ranks.validate(5, 0.5) == [True, True]
    assert ranks.known()[2] == at(5, 0.5)
    ranks.zero.writer.note(at(5, 0.5), True)
    ranks.zero.writer.wait()
    ranks.together("sync")
    assert ranks.known() == (3, 3, at(3, 2.0))


@pytest.fixture
def tracker(tmp_path):
    return CheckpointTracker(Writer(tmp_path, keep=1))


def test_a_checkpoint_says_what_is_known_of_validations(tracker, tmp_path):
    assert tracker.state_dict() == {"best": None, "validated_step": None, "val_loss": None, "validation_due": False}
    assert tracker.add_validation(4, 2.0, lambda: True)
    assert not tracker.add_validation(8, 3.0, lambda: True)
    tracker.validation_due = True
    state = {"best": {"step": 4, "val_loss": 2.0}, "validated_step": 8, "val_loss": 3.0, "validation_due": True}
    assert tracker.state_dict() == state
    assert list(tracker.state_dict()) == list(state)  # the order in `state.json`
    restored = CheckpointTracker(Writer(tmp_path, keep=1))
    restored.load_state_dict(state)
    assert (restored.validated_step, restored.best) == (8, at(4, 2.0))
    assert restored.pointer(8) == at(8, 3.0)
    assert not restored.add_validation(12, 2.5, lambda: True)


def test_a_validation_that_was_done_later_is_not_due(tmp_path):
    path = tmp_path / "step-00000004"
    path.mkdir()
    state = {"best": None, "validated_step": None, "validation_due": True}
    assert not is_validation_due(state | {"validation_due": False}, path, 4)
    assert is_validation_due(state, path, 4)
    assert state["validated_step"] is None
    pointers.write_note(tmp_path, at(4, 2.0))
    assert not is_validation_due(state, path, 4)
    assert (state["validated_step"], state["val_loss"]) == (4, 2.0)
    note = path / pointers.VALIDATION
    note.write_text(note.read_text()[:9])
    assert is_validation_due(state, path, 4)

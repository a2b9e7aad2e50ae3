"""What ranks know of the checkpoints: two ledgers, of which one has a writer that writes."""

import errno
import threading

import pytest
import torch

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.ledger import Ledger
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.writer import Writer


class Ranks:
    """Rank 0 and rank 1, which do everything together."""

    def __init__(self, folder):
        self.zero, self.one = (Ledger(Writer(folder, keep=2)) for _ in range(2))
        self.zero.writer.begin(None, None)
        self.together("sync")

    def together(self, method, value=(None, None)):
        """`share` or `sync` on both; returns what each gets."""
        sent = []
        first = getattr(self.zero, method)(lambda own: sent.append(own) or own, value[0])
        return first, getattr(self.one, method)(lambda own: sent[0], value[1])

    def save(self, step, flush=lambda: None):
        for rank in (self.zero, self.one):
            rank.taken_step = step
        self.zero.save({"state_dict": {"w": torch.ones(3)}, "global_step": step}, at(step), flush)
        self.together("share")

    def known(self):
        zero, one = ((rank.taken_step, rank.saved_step, rank.best) for rank in (self.zero, self.one))
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


def test_a_checkpoint_counts_as_taken_until_it_is_known_to_be_saved(ranks, monkeypatch):
    gate, write = threading.Event(), files.write
    monkeypatch.setattr(files, "write", lambda *given: gate.wait(30) and write(*given))
    ranks.save(3)
    assert ranks.known() == (3, None, None)
    gate.set()
    ranks.zero.writer.wait()
    assert ranks.together("sync", (1.5, 9.0)) == (1.5, 1.5)
    assert ranks.known() == (3, 3, None)


@pytest.mark.parametrize("what", ["the disk", "the logs"])
def test_one_that_could_not_be_written_is_to_be_taken_again(ranks, monkeypatch, caplog, what):
    ranks.save(3)
    ranks.zero.writer.wait()
    with monkeypatch.context() as patch:
        if what == "the disk":
            patch.setattr(files, "write", full)
        ranks.save(4, full if what == "the logs" else lambda: None)
        ranks.zero.writer.wait()
    ranks.together("share")
    assert ranks.known() == (3, 3, None)
    assert "step 4 could not be saved, training goes on" in caplog.text
    ranks.save(4)
    ranks.zero.writer.wait()
    ranks.together("share")
    assert ranks.known() == (4, 4, None)


def test_the_best_is_a_hope_until_it_is_on_the_disk(ranks, monkeypatch):
    def best(pointer, taken):
        return [rank.expect_best(pointer, lambda: taken) for rank in (ranks.zero, ranks.one)]

    ranks.save(3)
    assert best(at(3, 2.0), True) == [True, True]
    assert ranks.zero.is_best_missing()
    ranks.zero.note(at(3, 2.0), True, lambda: None)
    ranks.zero.writer.wait()
    assert not ranks.zero.is_best_missing()
    ranks.together("sync")
    assert ranks.known() == (3, 3, at(3, 2.0))
    assert best(at(4, 1.0), False) == [False, False]  # it was not taken
    assert ranks.known()[2] == at(3, 2.0)
    monkeypatch.setattr(files, "write", full)
    ranks.save(5)
    assert best(at(5, 0.5), True) == [True, True]
    assert ranks.known()[2] == at(5, 0.5)
    ranks.zero.note(at(5, 0.5), True, lambda: None)
    ranks.zero.writer.wait()
    ranks.together("sync")
    assert ranks.known() == (3, 3, at(3, 2.0))


def test_logs_that_cannot_be_written_cost_the_note_and_no_more(ranks, caplog):
    ranks.save(3)
    ranks.zero.note(at(3, 2.0), True, full)
    ranks.zero.writer.wait()
    assert "the validation of step 3 could not be noted" in caplog.text
    assert pointers.read(ranks.zero.writer.folder, "best") is None


def test_who_leaves_loses_nothing_and_hears_of_no_error(ranks, monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError("in the writer")

    ranks.save(3)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", broken)
        ranks.zero.writer.wait()
        ranks.save(4)
        ranks.zero.leave()
    assert "a checkpoint was lost: ZeroDivisionError: in the writer" in caplog.text
    ranks.save(5)  # and waits
    assert list(pointers.steps(ranks.zero.writer.folder)) == [3, 5]
    ranks.zero.clear()
    assert (ranks.zero.taken_step, ranks.zero.saved_step, ranks.zero.best) == (None, None, None)

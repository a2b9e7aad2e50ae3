"""What a run knows of its validations, and what a checkpoint says of them."""

import math

import pytest

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.checkpoint.ledger import Ledger, Validations, still_due
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.writer import Writer


@pytest.fixture
def known(tmp_path):
    return Validations(Ledger(Writer(tmp_path, keep=1)))


def test_a_checkpoint_says_what_is_known(known):
    assert known.state_dict() == {"best": None, "validated_step": None, "validation_due": False}
    assert known.add(4, 2.0, lambda: True)
    assert not known.add(8, 3.0, lambda: True)
    known.due = True
    state = {"best": {"step": 4, "val_loss": 2.0}, "validated_step": 8, "validation_due": True}
    assert known.state_dict() == state
    assert list(known.state_dict()) == list(state)  # the order in `state.json`


def test_what_a_checkpoint_says_is_known_again_but_for_the_loss(known, tmp_path):
    known.add(4, 2.0, lambda: True)
    after = Ledger(Writer(tmp_path, keep=1))
    restored = Validations(after)
    restored.load_state_dict(known.state_dict())
    assert (restored.step, after.best) == (4, Pointer("step-00000004", 4, 2.0))
    assert restored.pointer(4) == Pointer("step-00000004", 4, None)
    assert not restored.add(8, 2.5, lambda: True)


def test_a_best_that_is_not_saved_is_none(known):
    assert not known.add(4, 2.0, lambda: False)
    assert (known.step, known.state_dict()["best"]) == (4, None)


def test_a_pointer_has_the_loss_of_its_own_step_if_it_is_finite(known):
    known.add(4, 2.0, lambda: True)
    assert [known.pointer(step).val_loss for step in (4, 5)] == [2.0, None]
    known.add(4, math.inf, lambda: True)
    assert known.pointer(4) == Pointer("step-00000004", 4, None)
    known.clear()
    assert (known.step, known.pointer(4).val_loss) == (None, None)


def test_a_validation_that_was_done_later_is_not_due(tmp_path):
    path = tmp_path / "step-00000004"
    path.mkdir()
    state = {"best": None, "validated_step": None, "validation_due": True}
    assert not still_due(state | {"validation_due": False}, path, 4)
    assert still_due(state, path, 4)
    assert state["validated_step"] is None
    pointers.note(tmp_path, Pointer(path.name, 4, 2.0))
    assert not still_due(state, path, 4)
    assert state["validated_step"] == 4
    note = path / pointers.VALIDATION
    note.write_text(note.read_text()[:9])
    assert still_due(state | {"validated_step": None}, path, 4)

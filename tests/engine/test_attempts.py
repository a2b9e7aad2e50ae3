"""Attempts and evaluations in batches that fit: sizes are remembered, gradients of a failed attempt are not."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from gpt2_fp8.engine import out_of_memory
from gpt2_fp8.engine.attempts import Attempts
from gpt2_fp8.engine.evaluation import Evaluation

IDS = torch.zeros(8, 5, dtype=torch.int32)
AGREE = ("agree", None)
NO_AVERAGE = SimpleNamespace(in_place=nullcontext)


class Gradients:
    """Holds `room` sequences at a time; says what it was asked for."""

    exchange = SimpleNamespace(end=lambda: None, place=None)
    plan = SimpleNamespace(evaluates_in_bf16=True)

    def __init__(self, room):
        self.room, self.asked, self.discarded = room, [], 0
        self.scaling = SimpleNamespace(
            agree=lambda: self.asked.append(AGREE), unchanged=nullcontext, ready=False, take=lambda: False,
            remember=lambda: undo,
        )  # fmt: skip

    def _try(self, what, size):
        self.asked.append((what, size))
        if size > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def calibrate(self, ids, size):
        self._try("calibrate", size)

    def of_step(self, ids, size):
        self._try("gradients", size)
        return torch.tensor(1.0)

    def discard(self):
        self.discarded += 1


def attempts(gradients, share=8, size=8):
    return Attempts(gradients, share, size)


def undo():
    pass


def test_a_calibration_that_does_not_fit_is_the_first_to_halve():
    gradients = Gradients(room=2)
    of = attempts(gradients)
    with torch.no_grad():  # as in a validation that comes first
        of.find_scales(IDS)
    of.in_own_precision(IDS, undo)
    tried = [("calibrate", 8), ("calibrate", 4), ("calibrate", 2), AGREE]
    assert (gradients.asked, gradients.discarded) == ([*tried, ("gradients", 2), AGREE], 2)


@pytest.mark.parametrize("what", ["calibrate", "gradients"])
def test_ranks_agree_once_all_have_succeeded(monkeypatch, what):
    """Here there is room, and the first answer is that another rank had none."""
    answers = [True, False]
    monkeypatch.setattr(out_of_memory, "any_rank", lambda flag: flag or answers.pop(0))
    gradients = Gradients(room=8)
    of = attempts(gradients)
    of.find_scales(IDS) if what == "calibrate" else of.in_own_precision(IDS, undo)
    assert (gradients.asked, gradients.discarded) == ([(what, 8), (what, 4), AGREE], 1)


@pytest.mark.parametrize(
    ("saved", "begins"),
    [({"asked": 8, "fits": 2}, 2), ({"asked": 4, "fits": 2}, 8), ({"asked": 8, "fits": 3}, 8)],
    ids=["as it was", "something else is asked for", "no equal parts"],
)
def test_what_fitted_before_is_taken_where_the_same_is_asked_for(saved, begins):
    gradients = Gradients(room=8)
    of = attempts(gradients)
    of.load_state_dict(saved)
    of.in_own_precision(IDS, undo)
    assert gradients.asked == [("gradients", begins), AGREE]
    assert of.state_dict() == {"asked": 8, "fits": begins}


def test_an_evaluation_counts_no_padding():
    """Rows of padding have no target, and their mean is no number."""
    ids = torch.tensor([[1, 2, 3], [1, -1, -1], [-1, -1, -1], [-1, -1, -1]], dtype=torch.int32)

    def loss(part):
        counted = part[:, 1:] >= 0
        return torch.tensor(2.0) if counted.any() else torch.tensor(float("nan"))

    gradients = Gradients(room=4)
    gradients.evaluate = loss
    of = Evaluation(None, gradients, undo, NO_AVERAGE)
    assert of.sums(ids).tolist() == [4.0, 2.0]
    of._batch.size = 1
    assert of.sums(ids).tolist() == [4.0, 2.0]


class BesideGraphs(Gradients):
    """Has no room for a validation while training's CUDA graphs are there."""

    def __init__(self, room):
        super().__init__(room)
        self.graphs = True

    def of_step(self, ids, size):
        self.graphs = True
        return super().of_step(ids, size)

    def of_step_in_bf16(self, ids, size, many=False):
        self._try("bf16" + " beside graphs" * self.graphs, size + 8 * self.graphs)
        return torch.tensor(1.0)

    def release_graphs(self):
        there, self.graphs = self.graphs, False
        return there

    def evaluate(self, ids):
        self._try("evaluation" + " beside graphs" * self.graphs, len(ids) + 8 * self.graphs)
        return torch.tensor(2.0)


def test_64_a_validation_takes_the_room_of_cuda_graphs_before_it_becomes_smaller(caplog):
    caplog.set_level(logging.WARNING)
    gradients = BesideGraphs(room=4)
    of, evaluation = attempts(gradients), Evaluation(None, gradients, undo, NO_AVERAGE)
    of.in_own_precision(IDS, undo)
    gradients.asked.clear(), caplog.clear()
    assert evaluation.sums(IDS).tolist() == [64.0, 32.0], "the sum of the losses of 32 targets, of 2 each"
    assert gradients.asked == [("evaluation beside graphs", 16), ("evaluation", 8), *[("evaluation", 4)] * 2]
    assert len(caplog.records) == 2
    of.in_own_precision(IDS, undo)
    assert gradients.graphs, "recorded again"
    gradients.asked.clear(), caplog.clear()
    assert evaluation.sums(IDS).tolist() == [64.0, 32.0]
    assert gradients.asked == [("evaluation", 4)] * 2, "the next validation begins without them"
    assert not caplog.records


@pytest.mark.parametrize(
    ("room", "many", "asked", "fits"),
    [(4, False, [("bf16 beside graphs", 12), ("bf16", 4)], 4), (4, True, [("bf16", 4)], 4),
     (2, True, [("bf16", 4), ("bf16", 2)], 2)],
)  # fmt: skip
def test_64_steps_in_bf16_take_the_room_of_cuda_graphs_before_they_become_smaller(room, many, asked, fits):
    """At once where `many` steps follow."""
    gradients = BesideGraphs(room=4)
    of = attempts(gradients, size=4)
    of.in_own_precision(IDS, undo)
    gradients.asked.clear()
    gradients.room = room
    of.in_bf16(IDS, many=many)
    assert gradients.asked == [*asked, AGREE]
    assert (of.training.size, of.state_dict().get("fits_in_bf16", 4)) == (4, fits)


@pytest.mark.parametrize(("saved", "expected"), [(4, 4), (3, None), (None, None)])
def test_the_size_in_bf16_is_continued_with_if_it_divides_a_step(saved, expected):
    of = attempts(BesideGraphs(room=16), size=2)
    of.load_state_dict({"asked": 2, "fits": 2} | ({} if saved is None else {"fits_in_bf16": saved}))
    assert (of._in_bf16 and of._in_bf16.size) == expected

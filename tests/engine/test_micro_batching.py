"""What is asked for in batches that fit: sizes are remembered, gradients of a failed attempt are not."""

import logging
from types import SimpleNamespace

import pytest
import torch

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.engine import micro_batching, out_of_memory
from gpt2_fp8.engine.micro_batching import MicroBatching

IDS = torch.zeros(8, 5, dtype=torch.int32)
AGREE = ("agree", None)


class Gradients:
    """Holds `room` sequences at a time; says what it was asked for."""

    parameters = ()

    def __init__(self, room):
        self.room, self.asked, self.discarded = room, [], 0
        self.scaling = SimpleNamespace(agree=lambda: self.asked.append(AGREE))

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


def batching(gradients, share=8, size=8):
    return MicroBatching(gradients, share, size)


def test_a_calibration_that_does_not_fit_is_the_first_to_halve():
    gradients = Gradients(room=2)
    of = batching(gradients)
    with torch.no_grad():  # as in a validation that comes first
        of.calibrate(IDS)
    of.gradients(IDS)
    tried = [("calibrate", 8), ("calibrate", 4), ("calibrate", 2), AGREE]
    assert gradients.asked == [*tried, ("gradients", 2), AGREE]
    assert gradients.discarded == 2


def test_a_calibration_for_which_nothing_is_small_enough_ends_with_advice():
    with pytest.raises(UserError, match="micro_batch_size=1"):
        batching(Gradients(room=0)).calibrate(IDS)


@pytest.mark.parametrize("what", ["calibrate", "gradients"])
def test_ranks_agree_once_all_have_succeeded(monkeypatch, what):
    """Here there is room, and the first answer is that another rank had none."""
    answers = [True, False]
    monkeypatch.setattr(out_of_memory, "any_rank", lambda flag: flag or answers.pop(0))
    gradients = Gradients(room=8)
    getattr(batching(gradients), what)(IDS)
    assert gradients.asked == [(what, 8), (what, 4), AGREE]
    assert gradients.discarded == 1


@pytest.mark.parametrize(
    ("saved", "begins"),
    [({"asked": 8, "fits": 2}, 2), ({"asked": 4, "fits": 2}, 8), ({"asked": 8, "fits": 3}, 8)],
    ids=["as it was", "something else is asked for", "no equal parts"],
)
def test_what_fitted_before_is_taken_where_the_same_is_asked_for(saved, begins):
    gradients = Gradients(room=8)
    of = batching(gradients)
    of.load_state_dict(saved)
    of.gradients(IDS)
    assert gradients.asked == [("gradients", begins), AGREE]
    assert of.state_dict() == {"asked": 8, "fits": begins}


def test_an_evaluation_counts_no_padding():
    """Rows of padding have no target, and their mean is no number."""
    ids = torch.tensor([[1, 2, 3], [1, -1, -1], [-1, -1, -1], [-1, -1, -1]], dtype=torch.int32)

    def loss(part):
        counted = part[:, 1:] >= 0
        return torch.tensor(2.0) if counted.any() else torch.tensor(float("nan"))

    of = batching(SimpleNamespace(evaluated=loss), share=4, size=4)
    assert of.evaluate(ids).tolist() == [4.0, 2.0]
    of._evaluation.size = 1
    assert of.evaluate(ids).tolist() == [4.0, 2.0]


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

    def evaluated(self, ids):
        self._try("evaluation" + " beside graphs" * self.graphs, len(ids) + 8 * self.graphs)
        return torch.tensor(2.0)


def test_64_a_validation_takes_the_room_of_cuda_graphs_before_it_becomes_smaller(caplog):
    caplog.set_level(logging.WARNING)
    gradients = BesideGraphs(room=4)
    of = batching(gradients)
    of.gradients(IDS)
    gradients.asked.clear(), caplog.clear()
    assert of.evaluate(IDS).tolist() == [64.0, 32.0], "the sum of the losses of 32 targets, of 2 each"
    assert gradients.asked == [("evaluation beside graphs", 16), ("evaluation", 8), *[("evaluation", 4)] * 2]
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "no room for a validation beside training's CUDA graphs", "out of memory",
    ]  # fmt: skip
    of.gradients(IDS)
    assert gradients.graphs, "recorded again"
    gradients.asked.clear(), caplog.clear()
    assert of.evaluate(IDS).tolist() == [64.0, 32.0]
    assert gradients.asked == [("evaluation", 4)] * 2, "the next validation begins without them"
    assert not caplog.records


def test_64_a_step_that_is_run_again_in_bf16_takes_the_room_of_cuda_graphs_before_it_becomes_smaller(caplog):
    gradients = BesideGraphs(room=4)
    of = batching(gradients, size=4)
    of.gradients(IDS)
    gradients.asked.clear()
    of.gradients_in_bf16(IDS)
    assert gradients.asked == [("bf16 beside graphs", 12), ("bf16", 4), AGREE]
    assert gradients.discarded == 1, "the gradients of the attempt"
    said = "no room for a step in bf16 beside training's CUDA graphs: they are recorded again"
    assert [record.message for record in caplog.records] == [said], "no size has changed"


def test_ranks_try_the_same_size_again_in_bf16_where_one_of_them_had_graphs_to_free(monkeypatch):
    """This one has none: its last validation took their room."""
    gradients, answers = BesideGraphs(room=4), [True, False]
    monkeypatch.setattr(out_of_memory, "any_rank", lambda flag: answers.pop(0))  # of memory
    monkeypatch.setattr(micro_batching.collectives, "any_rank", lambda freed: True)
    of = batching(gradients, size=4)
    gradients.graphs = False
    of.gradients_in_bf16(IDS)
    assert gradients.asked == [("bf16", 4), ("bf16", 4), AGREE]


def test_steps_that_all_compute_in_bf16_free_the_graphs_first_and_then_become_smaller():
    gradients = BesideGraphs(room=8)
    of = batching(gradients, size=8)
    of.gradients(IDS)
    gradients.asked.clear()
    gradients.room = 4
    of.gradients_in_bf16(IDS, many=True)
    assert gradients.asked == [("bf16", 8), ("bf16", 4), AGREE]
    assert of.training.size == 8
    assert of.state_dict()["fits_in_bf16"] == 4


def test_steps_in_bf16_that_do_not_fit_at_all_are_told_what_leaves_them_out():
    of = batching(BesideGraphs(room=0), size=1)
    with pytest.raises(UserError) as error:
        of.gradients_in_bf16(IDS, many=True)
    (problem,) = error.value.problems
    assert problem.cause.startswith("out of memory with micro_batch_size in bf16=1")
    assert problem.remedy.startswith("precision.bf16_last_steps=0, ")


@pytest.mark.parametrize(("saved", "expected"), [(4, 4), (2, 2), (3, None), (None, None)])
def test_the_size_in_bf16_is_continued_with_if_it_divides_a_step(saved, expected):
    of = batching(BesideGraphs(room=16), size=2)
    of.load_state_dict({"asked": 2, "fits": 2} | ({} if saved is None else {"fits_in_bf16": saved}))
    assert (of._in_bf16 and of._in_bf16.size) == expected

"""Which checkpoint a run goes back to."""

import shutil

import pytest
import torch

from gpt2_fp8.checkpoint import files
from gpt2_fp8.checkpoint.pointers import folder_name
from gpt2_fp8.engine.divergence import RollBack
from gpt2_fp8.train.setup import choose_rollback


def write(folder, step, weight=1.0, moment=1.0):
    state = {"exp_avg": torch.full((3,), moment), "step": torch.tensor(float(step))}
    path = folder / folder_name(step)
    optimizer = {"state": {0: state}, "param_groups": [{"lr": 0.1}]}
    model = {"weight": torch.full((3,), weight)}
    checkpoint = {"global_step": step, "state_dict": model, "optimizer_states": [optimizer]}
    files.write(path, checkpoint)
    return path


ALL = (10, 20, 30, 40)
CASES = [  # before which step; whether no update was made since; at which step; the run's own; what is found
    (35, False, 50, ALL, 30), (30, False, 50, ALL, 30), (29, False, 50, ALL, 20),
    (35, False, 50, (10,), 10), (35, False, 50, (), None),
    (5, False, 50, ALL, None), (5, True, 50, ALL, 10), (5, True, 50, (20, 30), 20), (25, True, 50, ALL, 20),
    (5, True, 39, (40,), None),
]  # fmt: skip


@pytest.mark.parametrize(("before", "intact", "step", "saved", "expected"), CASES)
def test_the_newest_of_its_own_before_the_trouble_or_one_without_it(tmp_path, before, intact, step, saved, expected):
    for written in ALL:
        write(tmp_path, written)
    found = choose_rollback(RollBack(step, before, "", intact), tmp_path, saved, None)
    assert found == (expected and tmp_path / folder_name(expected))


def test_a_resumed_run_owns_what_it_continued_and_what_was_before_it(tmp_path):
    for written in ALL:
        write(tmp_path, written)
    origin, back = tmp_path / "step-00000020", RollBack(50, 35, "", False)
    assert choose_rollback(back, tmp_path, {40}, origin) == origin
    shutil.rmtree(origin)
    write(tmp_path, 20, weight=float("nan"))
    assert choose_rollback(back, tmp_path, {40}, origin) == tmp_path / "step-00000010"

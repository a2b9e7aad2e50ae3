"""Which checkpoint a run goes back to."""

import shutil

import pytest
import torch

from gpt2_fp8.checkpoint import files
from gpt2_fp8.checkpoint.pointers import folder_name
from gpt2_fp8.engine.divergence import RollBack
from gpt2_fp8.train.fit import checkpoint_before


def write(folder, step, weight=1.0, moment=1.0):
    state = {"exp_avg": torch.full((3,), moment), "step": torch.tensor(float(step))}
    path = folder / folder_name(step)
    checkpoint = {
        "global_step": step,
        "state_dict": {"weight": torch.full((3,), weight)},
        "optimizer_states": [{"state": {0: state}, "param_groups": [{"lr": 0.1}]}],
    }
    files.write(path, checkpoint)
    return path


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 10, 20, 30 and 40."""
    for step in (10, 20, 30, 40):
        write(tmp_path, step)
    return tmp_path


def found(folder, before, saved=(10, 20, 30, 40), origin=None, intact=False, step=50):
    path = checkpoint_before(RollBack(step, before, "", intact), folder, saved, origin)
    return path and path.name


def test_the_newest_before_the_trouble(folder):
    assert found(folder, 35) == "step-00000030"
    assert found(folder, 30) == "step-00000030"
    assert found(folder, 29) == "step-00000020"


def test_another_runs_checkpoints_do_not_count(folder):
    assert found(folder, 35, saved={10}) == "step-00000010"
    assert found(folder, 35, saved=set()) is None


def test_a_resumed_run_owns_what_it_continued_and_what_was_before_it(folder):
    assert found(folder, 35, saved={40}, origin=folder / "step-00000020") == "step-00000020"
    shutil.rmtree(folder / "step-00000020")
    write(folder, 20, weight=float("nan"))
    assert found(folder, 35, saved={40}, origin=folder / "step-00000020") == "step-00000010"


def test_one_of_the_midst_serves_where_there_is_none_before_and_no_update_was_made(folder):
    assert found(folder, 5) is None
    assert found(folder, 5, intact=True) == "step-00000010"
    assert found(folder, 5, saved={20, 30}, intact=True) == "step-00000020"
    assert found(folder, 25, intact=True) == "step-00000020", "an older one first"
    assert found(folder, 5, saved={40}, intact=True, step=39) is None

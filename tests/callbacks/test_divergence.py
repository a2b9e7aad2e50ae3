"""What the divergence callback names as a help, after a way back."""

from pathlib import Path

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.callbacks.divergence import DivergenceGuard
from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.config.errors import Diverged

(CONFIG,) = compose.preflight([])


def save(folder: Path, step: int, weight: float) -> None:
    state = {"state_dict": {"w": torch.full((8,), weight)}, "optimizer_states": [], "global_step": step}
    files.write(folder / pointers.folder_name(step), state)


def named(guard: DivergenceGuard, step: int) -> str:
    """The end of what is said when the run diverges at a step."""
    with pytest.raises(Diverged) as error:
        guard.policy.end(step, weights_finite=False)
    return str(error.value).rpartition("may help, ")[2].rpartition("/")[2]


def test_a_checkpoint_of_a_branch_left_behind_is_not_named(tmp_path: Path) -> None:
    guard = DivergenceGuard(CONFIG.callbacks, lambda trainer: True, [], tmp_path)
    for step in (4, 9):
        save(tmp_path, step, weight=1.0)
    assert named(guard, 12) == "step-00000009"
    guard.start_again(4)
    assert named(guard, 12) == "step-00000004"
    save(tmp_path, 5, weight=2.0)
    assert named(guard, 12) == "step-00000005"


def test_a_run_that_went_back_to_its_start_is_told_to_begin_there(tmp_path: Path) -> None:
    guard = DivergenceGuard(CONFIG.callbacks, lambda trainer: True, [], tmp_path)
    save(tmp_path, 9, weight=1.0)
    guard.start_again(0)
    assert named(guard, 12) == "from the start"

"""Checkpoints of earlier formats, as the present code reads them. For format 1: `faults/test_damaged`."""

from pathlib import Path

import pytest
import torch

from gpt2_fp8.checkpoint import files
from gpt2_fp8.checkpoint.files import read_plain, upgrade

VERSION_2 = Path(__file__).parent / "fixtures" / "version_2" / "step-00000003"  # of a run in pretended FP8


def test_a_run_can_continue_from_a_checkpoint_of_version_2():
    assert files.read_manifest(VERSION_2)["version"] == 2
    state = files.read(VERSION_2)
    step = state["training_step"]
    assert step["micro_batch_size"] == {"asked": 4, "fits": 4}
    assert step["scaling"].pop("settings") == "fp8_hybrid, pretended"
    assert step["scaling"].pop("sequences") == 8
    assert {name: tensor.shape for name, tensor in step["scaling"].items()} == {
        f"model.scales.{direction}.{kind}": torch.Size([1] if kind == "scale" else [4, 1])
        for direction in ("scaling_fwd", "scaling_bwd")
        for kind in ("scale", "amax_history")
    }
    assert step["scaling"]["model.scales.scaling_fwd.scale"].item() == 448 / 2
    assert set(state["callbacks"]) == {"Checkpointing", "DivergenceGuard"}
    assert not {"FP8Precision", "micro_batch_size"} & state.keys()
    assert read_plain(VERSION_2, "training_step")["scaling"]["settings"] == "fp8_hybrid, pretended"


@pytest.mark.parametrize("state", [{}, {"training_step": {"scaling": {}}, "callbacks": {"Checkpointing": 1}}])
def test_what_has_the_present_keys_stays_as_it_is(state):
    assert upgrade(state) == state

"""What runs in emulated FP8 save. The rest is in test_fp8_layers.py."""

import pytest

from gpt2_fp8.checkpoint.files import read
from gpt2_fp8.train.trained import from_checkpoint
from tests.runs import checkpoint, train, training_step

pytestmark = pytest.mark.whole
FP8 = ["precision.backend=emulated"]


def test_scales_are_saved_and_a_checkpoint_of_before_finds_its_anew(tmp_path, caplog):
    """`precision.emulate` once chose single operands, and the head had scales."""
    train(tmp_path, *FP8)
    plain = read(checkpoint(tmp_path, 12))
    scaling = plain["training_step"]["scaling"]
    assert "emulated" in scaling["settings"]
    assert scaling["scales.scaling_fwd.scale"].numel() == 2 * 4
    assert scaling["scales.scaling_bwd.amax_history"].shape == (16, 4)
    assert (scaling["scales.scaling_bwd.amax_history"][1:12] > 0).all()
    plain["hyper_parameters"]["precision"]["emulate"] = ["weight"]
    with caplog.at_level("INFO"):
        assert from_checkpoint(plain, tmp_path).precision.backend == "emulated"
        step = training_step(*FP8, "recipe=delayed")
        step.scaling.load_state_dict(dict(scaling, settings="of before"))
        assert not step.scaling.take()
    assert "precision.emulate is dropped" in caplog.text

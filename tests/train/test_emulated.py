"""What is particular to runs in emulated FP8: what they say, need and save. The rest is in test_fp8_layers.py."""

import pytest

from gpt2_fp8.checkpoint.files import read
from gpt2_fp8.train.trained import from_checkpoint
from tests.runs import checkpoint, summary, train, training_step

pytestmark = pytest.mark.whole
FP8 = ["precision.backend=emulated"]


def test_log_and_summary_say_what_is_emulated(tmp_path, caplog):
    with caplog.at_level("INFO"):
        train(tmp_path, *FP8, "trainer.max_steps=3", "trainer.val_check_interval=3")
    said = dict(message.split(maxsplit=1) for message in caplog.messages if " " in message)
    assert said["layers"] == "FP8 emulated in plain torch; attention torch's flash kernel"
    assert said["precision"] == "fp8_hybrid, recipe delayed, evaluation bf16"
    found = summary(tmp_path)
    told = {"asked": "fp8_hybrid", "ran": "fp8_hybrid", "reason": None, "last_in_bf16": 0}
    assert found["precision"] == told
    assert found["recipe"] == "delayed"


def test_scales_are_saved_with_their_settings(tmp_path, caplog):
    train(tmp_path, *FP8)
    scaling = read(checkpoint(tmp_path, 12))["training_step"]["scaling"]
    assert "emulated" in scaling["settings"]
    assert scaling["scales.scaling_fwd.scale"].numel() == 2 * 4
    assert scaling["scales.scaling_bwd.amax_history"].shape == (16, 4)
    assert (scaling["scales.scaling_bwd.amax_history"][1:12] > 0).all()


def test_a_checkpoint_of_before_loses_its_key_and_finds_its_scales_anew(tmp_path, caplog):
    """`precision.emulate` once chose single operands, and the head had scales."""
    train(tmp_path, *FP8)
    plain = read(checkpoint(tmp_path, 12))
    plain["hyper_parameters"]["precision"]["emulate"] = ["weight"]
    with caplog.at_level("INFO"):
        assert from_checkpoint(plain, tmp_path).precision.backend == "emulated"
        step = training_step(*FP8, "recipe=delayed")
        step.scaling.load_state_dict(dict(plain["training_step"]["scaling"], settings="of before"))
        assert not step.scaling.take()
    assert "precision.emulate is dropped" in caplog.text
    assert "new ones are found" in caplog.text

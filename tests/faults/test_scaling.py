"""Faults 38, 40, 78 to 81 and 109: what delayed scaling's state can hold, and how it is kept; FP8 is pretended."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gpt2_fp8 import compose
from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.backends import Fused
from gpt2_fp8.fp8.scaling import JUMP, FP8Scaling
from gpt2_fp8.layers.delayed_scaling import DelayedScaling, Scales
from tests.faults.pretended import NAN, Faults, going_wrong
from tests.layers.test_delayed_scaling import trained
from tests.runs import summary, train


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan"), 1e-45, 3e38])
@pytest.mark.parametrize("before", [0.0, 2.0])
def test_38_whatever_magnitude_is_seen_the_scale_stays_finite(amax, before):
    scales, _ = fused()
    scales.history[1] = before
    scales.history[0] = amax
    scales.update()
    for _ in range(3):  # and no later step trips over it
        assert torch.isfinite(scales.scale).all()
        assert (scales.scale > 0).all()
        assert torch.isfinite(scales.scale_inv).all()
        assert torch.isfinite(scales.history).all()
        scales.update()


def fused():
    """The fused layers' state and its owner, as a checkpoint's is put into it."""
    scales = Scales(DelayedScaling(4, 0, False, torch.float8_e4m3fn, torch.float8_e5m2))
    for direction in ("forward", "gradient"):
        scales.reserve(direction)
    scales.allocate(torch.device("cpu"))
    model = nn.Module()
    model.scales = scales
    return scales, FP8Scaling(model, "delayed", 8, nullcontext)


HISTORY = "scales.scaling_bwd.amax_history"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 3.0])
def test_109_what_a_run_may_have_saved_is_taken(value):
    scales, owner = fused()
    history = torch.full((4, 1), value)
    owner.load_state_dict({"settings": "delayed", **state.capture(owner.model), HISTORY: history})
    assert owner.take()
    assert torch.equal(scales.history[:, 1:].nan_to_num(-1), history.nan_to_num(-1))


class Magnitudes(Faults):
    """FP8 tensors of magnitudes 2 and 3; in step `accident` the first is 1e30, `skipped` has no finite loss in FP8."""

    def __init__(self, accident=None, skipped=None):
        self.accident, self.skipped = accident, skipped
        self.scales = Scales(DelayedScaling(4, 0, False, torch.float8_e4m3fn, torch.float8_e5m2))
        self.places = [self.scales.reserve("forward"), self.scales.reserve("gradient")]
        self.scales.allocate(torch.device("cpu"))
        self.found = {}

    def before(self, module, step):
        module.model.scales = self.scales

    def loss(self, module, step, precision):
        if precision == "fp8":
            for place, magnitude in zip(self.places, (1e30 if step == self.accident else 2.0, 3.0), strict=True):
                self.scales.slot(place).amax.fill_(magnitude)
        return NAN if (step, precision) == (self.skipped, "fp8") else 1.0

    def after(self, module, step):
        self.found[step] = self.scales.scale.clone()  # those that this step computed with


def run_with(folder, *accident, **keys):
    faults = Magnitudes(*accident, **keys)
    with going_wrong(faults):
        train(folder, "trainer.max_steps=8", "trainer.val_check_interval=8", "precision=fp8_hybrid")
    return faults


def test_78_a_step_run_again_in_bf16_leaves_scales_and_histories_as_it_found_them(tmp_path):
    """Its finite magnitudes too: 1e30 would cast the tensor to zeros for as long as the history is."""
    clean, faulty = run_with(tmp_path / "clean"), run_with(tmp_path / "run", accident=4, skipped=4)
    assert [event["what"] for event in summary(tmp_path / "run")["divergence"]["events"]] == ["rerun"]
    steps = [step for step in clean.found if step != 4]
    assert all(torch.equal(clean.found[step], faulty.found[step]) for step in steps)
    assert clean.scales.history[:4].tolist() == faulty.scales.history[:4].tolist()


def test_79_an_absurd_magnitude_in_a_step_that_counts_is_limited_and_said(tmp_path):
    clean, faulty = run_with(tmp_path / "clean"), run_with(tmp_path / "run", accident=4)
    (event,) = summary(tmp_path / "run")["divergence"]["events"]
    assert (event["step"], event["what"]) == (4, "magnitude")
    assert "amaxes of 1 FP8 tensors have jumped" in event["reason"]
    ratio = {step: (clean.found[step] / faulty.found[step]).tolist() for step in clean.found}
    assert ratio == {step: [JUMP if step in (5, 6, 7, 8) else 1.0, 1.0] for step in range(1, 9)}
    assert summary(tmp_path / "clean")["divergence"]["events"] == []


def owner_of(model, global_batch_size):
    (config,) = compose.preflight([f"global_batch_size={global_batch_size}", "micro_batch_size=1"])
    owner = Fused(config, "fp8_hybrid", "cuda").scaling(model)
    owner.context = nullcontext
    return owner


@pytest.mark.parametrize(("ranks", "global_batch_size"), [(1, 4), (4, 64), (4, 16)])
def test_81_gradients_scales_follow_a_rank_s_share_of_a_step_over_a_resume(monkeypatch, global_batch_size, ranks):
    """A gradient of the mean over fewer sequences is larger: the old scales would saturate it."""
    saved = owner_of(trained(), 16)
    saved.ready = True
    before = saved.state_dict()
    monkeypatch.setattr("gpt2_fp8.runtime.collectives.rank_and_world", lambda: (0, ranks))
    again = owner_of(trained(), global_batch_size)
    again.load_state_dict(before)
    assert again.take()
    larger = 16 / (global_batch_size // ranks)
    after = state.capture(again.model)
    for name, tensor in after.items():
        factor = 1.0 if "fwd" in name else 1 / larger if name.endswith("scale") else larger
        assert torch.equal(tensor, before[name] * factor), name
    assert again.state_dict()["sequences"] == global_batch_size // ranks


def test_81_scales_of_a_checkpoint_that_does_not_say_its_share_are_taken_as_they_are():
    saved = owner_of(trained(), 16)
    saved.ready = True
    before = saved.state_dict()
    del before["sequences"]
    again = owner_of(trained(), 4)
    again.load_state_dict(dict(before))
    assert again.take()
    assert all(torch.equal(before[name], tensor) for name, tensor in state.capture(again.model).items())

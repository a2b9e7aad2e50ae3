"""The fused layers' delayed scaling, which is plain torch: magnitudes to scales, once a step; and its checkpoint."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gpt2_fp8.engine.step import accumulate
from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.scaling import PASSES, calibrate
from gpt2_fp8.layers.delayed_scaling import DelayedScaling, Place, Scales

E4M3, E5M2 = 448.0, 57344.0  # the largest numbers of the two formats


def settings(history=4, margin=0, most_recent=False, gradient=torch.float8_e5m2):
    return DelayedScaling(history, margin, most_recent, torch.float8_e4m3fn, gradient)


def scales(forward=2, gradient=1, **keys):
    made = Scales(settings(**keys))
    for _ in range(forward):
        made.reserve("forward")
    for _ in range(gradient):
        made.reserve("gradient")
    made.allocate(torch.device("cpu"))
    return made


def see(of, *magnitudes):
    """As the kernels do: raise each tensor's magnitude, through its slot."""
    places = [Place("forward", i) for i in range(of._counts["forward"])]
    places += [Place("gradient", i) for i in range(of._counts["gradient"])]
    for place, magnitude in zip(places, magnitudes, strict=True):
        amax = of.slot(place).amax
        amax.copy_(torch.maximum(amax, torch.tensor([float(magnitude)])))


def step(of, *magnitudes, micro_batches=1):
    for i in range(micro_batches):
        of.begin(i == 0)
        see(of, *magnitudes)


def assert_reciprocal(of):
    assert torch.equal(of.scale_inv, (1 / of.scale)[:, None].expand(-1, 4))


# Places and slots


def test_places_are_counted_by_direction_whatever_the_order():
    of = Scales(settings())
    places = [of.reserve(direction) for direction in ("forward", "gradient", "forward", "gradient", "forward")]
    assert places == [("forward", 0), ("gradient", 0), ("forward", 1), ("gradient", 1), ("forward", 2)]
    of.allocate(torch.device("cpu"))
    assert (of.largest.tolist(), of.history.shape, of.scale.tolist()) == ([E4M3] * 3 + [E5M2] * 2, (4, 5), [1.0] * 5)
    assert torch.count_nonzero(of.history) == 0
    assert_reciprocal(of)


def test_every_slot_is_a_place_of_its_own_in_the_buffers():
    of = scales(forward=2, gradient=2)
    see(of, 1, 2, 3, 4)
    assert of.history[0].tolist() == [1, 2, 3, 4]
    of.scale.copy_(torch.tensor([2.0, 4, 8, 16]))
    of.scale_inv.copy_((1 / of.scale)[:, None])
    slots = [of.slot(Place(direction, i)) for direction in ("forward", "gradient") for i in range(2)]
    assert [slot.scale.item() for slot in slots] == [2, 4, 8, 16]
    assert [slot.scale_inv.item() for slot in slots] == [1 / 2, 1 / 4, 1 / 8, 1 / 16]
    offsets = [slot.scale_inv.data_ptr() - of.scale_inv.data_ptr() for slot in slots]
    assert offsets == [0, 16, 32, 48], "cuBLASLt reads at multiples of 16 bytes"


def test_slots_follow_the_buffers_to_another_place():
    model = nn.Sequential(scales(forward=1, gradient=1))
    of = model[0]
    before = of.slot(Place("gradient", 0))
    model.to("meta")
    assert {part.device.type for part in (of.scale, of.scale_inv, of.history, of.largest)} == {"meta"}
    slot = of.slot(Place("gradient", 0))
    assert slot is not before
    assert {part.device.type for part in slot[:3]} == {"meta"}
    model = nn.Sequential(scales(forward=1, gradient=1)).to(torch.float64)
    model[0].slot(Place("gradient", 0)).amax.fill_(7.0)
    assert model[0].history.dtype == model[0].scale.dtype == torch.float32, "whatever the parameters become"
    assert model[0].history[0].tolist() == [0, 7]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_magnitude_that_is_not_finite_is_forgotten_at_once(bad):
    of = scales(history=3)
    step(of, 8, 1, 16)
    step(of, bad, 1, 16)
    step(of, 4, 1, 16)
    of.begin(True)
    assert of.scale.tolist()[0] == E4M3 / 8
    assert torch.isfinite(of.history).all()


# From magnitudes to scales


def test_scale_is_the_formats_largest_over_the_largest_of_the_history():
    of = scales(history=3)
    for magnitudes in ((8, 1, 16), (2, 4, 1), (4, 2, 2)):
        step(of, *magnitudes)
    of.begin(True)
    assert of.scale.tolist() == [E4M3 / 8, E4M3 / 4, E5M2 / 16]
    assert_reciprocal(of)
    see(of, 1, 1, 1)
    of.begin(True)  # the first step has left the history
    assert of.scale.tolist() == [E4M3 / 4, E4M3 / 4, E5M2 / 2]


@pytest.mark.parametrize("keys", [{"most_recent": True}, {"history": 1}, {"history": 1, "most_recent": True}], ids=str)
def test_most_recent_or_a_history_of_one_step_takes_the_last_step_alone(keys):
    of = scales(**keys)
    for magnitudes in ((8, 1, 16), (2, 4, 1)):
        step(of, *magnitudes)
    of.begin(True)
    assert (of.scale.tolist(), of.history[0].tolist()) == ([E4M3 / 2, E4M3 / 4, E5M2 / 1], [0, 0, 0])


@pytest.mark.parametrize("margin", [0, 1, 3])
def test_margin_leaves_powers_of_two(margin):
    of = scales(margin=margin)
    step(of, 2, 4, 8)
    of.begin(True)
    assert of.scale.tolist() == [E4M3 / 2 / 2**margin, E4M3 / 4 / 2**margin, E5M2 / 8 / 2**margin]


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan"), 1e-44])
def test_a_tensor_without_a_finite_magnitude_keeps_its_scale(bad):
    of = scales(history=1)
    step(of, 2, 4, 8)
    of.begin(True)
    of.history[0] = torch.tensor([bad, 1.0, bad])
    of.begin(True)
    assert of.scale.tolist() == [E4M3 / 2, E4M3 / 1, E5M2 / 8]
    assert_reciprocal(of)


def test_scales_and_history_change_in_a_steps_first_forward_alone():
    of = scales()
    step(of, 2, 4, 8)
    of.begin(True)
    scale, history = of.scale.clone(), of.history.clone()
    assert history[:2].tolist() == [[0, 0, 0], [2, 4, 8]]
    see(of, 64, 64, 64)
    for _ in range(3):
        of.begin(False)
        assert torch.equal(of.scale, scale)
        assert of.history[:2].tolist() == [[64, 64, 64], [2, 4, 8]]
    of.begin(True)
    assert of.history[:3].tolist() == [[0, 0, 0], [64, 64, 64], [2, 4, 8]]
    assert of.scale.tolist() == [E4M3 / 64, E4M3 / 64, E5M2 / 64]


def test_a_steps_magnitude_is_that_of_all_its_micro_batches():
    of = scales(forward=1, gradient=0)
    of.begin(True)
    for magnitude in (2, 8, 4):
        see(of, magnitude)
        of.begin(False)
    of.begin(None)  # a step of a single forward
    assert of.scale.item() == E4M3 / 8


@pytest.mark.parametrize("evaluation", ["eval", "no_grad"])
@pytest.mark.parametrize("first", [None, True, False])
def test_evaluation_leaves_scales_and_history(evaluation, first):
    of = scales()
    step(of, 2, 4, 8)
    history = of.history.clone()
    of.train(evaluation != "eval")
    with torch.no_grad() if evaluation == "no_grad" else nullcontext():
        of.begin(first)
    assert torch.equal(of.history, history)
    assert of.scale.tolist() == [1, 1, 1]


def test_evaluation_takes_the_reciprocals_of_restored_scales():
    of = scales()
    of.scale.copy_(torch.tensor([2.0, 4.0, 8.0]))
    of.eval()
    of.begin(None)
    assert of.scale_inv[:, 0].tolist() == [0.5, 0.25, 0.125]
    assert_reciprocal(of)


# What `fp8.state` sees


class Model(nn.Module):
    """A model of one parameter, whose forward and backward see magnitudes as the fused layers' kernels do."""

    def __init__(self, **keys):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.weight.register_hook(self._see_gradient)
        self.scales = scales(**keys)
        self.passes = 0

    def forward(self, ids, is_first_microbatch=None):
        self.passes += 1
        self.scales.begin(is_first_microbatch)
        y = self.weight * ids.float().mean()
        for number, magnitude in enumerate((self.weight, y)):
            self.scales.slot(Place("forward", number)).amax.copy_(magnitude.detach().abs())
        return y

    def _see_gradient(self, gradient):
        self.scales.slot(Place("gradient", 0)).amax.copy_(gradient.detach().abs())


def trained():
    model = Model()
    for magnitudes in ((2, 4, 8), (1, 32, 2), (16, 6, 7)):
        step(model.scales, *magnitudes)
    return model


def test_nothing_of_it_is_in_the_state_dict():
    assert list(trained().state_dict()) == ["weight"]
    assert list(trained().named_buffers()) == []  # data parallelism copies rank 0's buffers over the other ranks'


def test_state_is_captured_by_direction():
    model = trained()
    saved = state.capture(model)
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {
        "scales.scaling_fwd.scale": (2,),
        "scales.scaling_fwd.amax_history": (4, 2),
        "scales.scaling_bwd.scale": (1,),
        "scales.scaling_bwd.amax_history": (4, 1),
    }
    assert saved["scales.scaling_bwd.amax_history"][:3, 0].tolist() == [7, 2, 8]
    copy = saved["scales.scaling_fwd.scale"].clone()
    model.scales.scale.zero_()
    assert torch.equal(saved["scales.scaling_fwd.scale"], copy), "captured is copied"


def test_a_restored_run_goes_on_as_the_one_that_was_saved():
    model, fresh = trained(), Model()
    state.restore(fresh, state.capture(model))
    for of in (model.scales, fresh.scales):
        step(of, 1, 1, 1, micro_batches=2)
        of.begin(True)
    assert torch.equal(model.scales.history, fresh.scales.history)
    assert torch.equal(model.scales.scale, fresh.scales.scale)
    assert model.scales.scale.tolist() == [E4M3 / 16, E4M3 / 32, E5M2 / 8]


def test_calibration_gives_the_scales_of_the_first_step():
    model, ids = Model(), torch.full((2, 9), 5)
    calibrate(model, model, ids, nullcontext)
    assert model.passes == PASSES
    assert model.weight.grad is None
    expected = [E4M3 / 3, E4M3 / 15, E5M2 / 5]  # weight, weight x 5, d loss / d weight, of the loss as it is
    assert model.scales.scale.tolist() == pytest.approx(expected)
    model.scales.begin(True)
    assert model.scales.scale.tolist() == pytest.approx(expected)
    assert_reciprocal(model.scales)


class Step(Model):
    """Likewise, of a loss that is the mean over all tokens, with the magnitudes of each token's own gradient."""

    def _see_gradient(self, gradient):
        pass

    def loss(self, ids, is_first_microbatch=None, scale=1.0):
        self.forward(ids, is_first_microbatch)
        y = self.weight * ids[:, 1:].float()
        slot = self.scales.slot(Place("gradient", 0))

        def see_gradient(gradient):
            slot.amax.copy_(torch.maximum(slot.amax, gradient.abs().max()))

        y.register_hook(see_gradient)
        return y.mean() * scale


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_calibration_finds_the_magnitudes_of_a_steps_gradients_whatever_a_micro_batchs_share_of_it(micro_batches):
    ids = torch.full((8, 9), 5)
    part = len(ids) // micro_batches
    model, plain = Step(), Step()
    calibrate(model, model.loss, ids[:part], nullcontext, share=part / len(ids))
    accumulate(ids, part, plain.loss, nullcontext, torch.Tensor.backward)
    plain.scales.begin(True)
    assert model.scales.scale[2].item() == plain.scales.scale[2].item() == E5M2 * ids[:, 1:].numel()

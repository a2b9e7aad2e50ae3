"""When the LightningModule finds FP8 scales: before the first forward that counts, whichever that is."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.precision.plugin import FP8Precision
from gpt2_fp8.precision.resolve import Plan
from gpt2_fp8.train.module import GPT2Module

IDS = torch.ones(2, 129, dtype=torch.int32)
PLAN = Plan("cpu", "fp8_hybrid", "fp8_hybrid", None, "reference", compile=False)


class Plugin(FP8Precision):
    """Finds scales in a checkpoint, or not, and says when it was asked."""

    def __init__(self, events, in_checkpoint):
        super().__init__(None, "settings")
        self.events, self.in_checkpoint = events, in_checkpoint

    def restore_scales(self):
        self.events.append("restore")
        return self.in_checkpoint

    forward_context = nullcontext


@pytest.fixture
def module():
    (config,) = compose.preflight(["model.n_layer=1", "micro_batch_size=1"])
    made = GPT2Module(config, PLAN, 257)
    made.configure_model()
    return made


def attach(module, in_checkpoint):
    """A plugin and a trainer around the module; returns what happens, in order."""
    events = []
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    module._trainer = SimpleNamespace(precision_plugin=Plugin(events, in_checkpoint), strategy=strategy)

    def calibrate(ids, _):
        assert torch.is_grad_enabled()
        events.append("calibrate")

    def loss(ids, *_):
        events.append("loss")
        return torch.ones(())

    module.engine.calibrate, module.engine.loss = calibrate, loss
    return events


@pytest.mark.parametrize(("in_checkpoint", "found"), [(True, ["restore"]), (False, ["restore", "calibrate"])])
def test_a_validation_that_comes_first_has_its_scales(module, in_checkpoint, found):
    """After a run that ended between its last step and the validation that was due."""
    events = attach(module, in_checkpoint)
    with torch.no_grad():
        module.on_validation_epoch_start()
        for _ in range(2):
            module.validation_step({"ids": IDS}, 0)
    assert events == [*found, "loss", "loss"]
    assert module._sums.tolist() == [2 * 256, 2 * 256]
    assert module.trainer.precision_plugin.scales_found or in_checkpoint

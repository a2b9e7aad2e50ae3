"""When a run finds its FP8 scales: before the first forward that counts, whichever that is."""

from types import SimpleNamespace

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.fp8.resolve import Plan
from gpt2_fp8.fp8.scaling import FP8Scaling
from gpt2_fp8.train.module import GPT2Module
from gpt2_fp8.train.precision_plugin import RunPrecision
from tests.faults.pretended import Pretended

IDS = torch.ones(2, 129, dtype=torch.int32)


class Backend(Pretended):
    """Finds scales in a checkpoint, or not, and says when it was asked."""

    def __init__(self, config, events, in_checkpoint):
        super().__init__(config)
        self.events, self.in_checkpoint = events, in_checkpoint

    def scaling(self, model):
        made = FP8Scaling(model, "settings", 8, self.forward_context)

        def take():
            self.events.append("take")
            made.ready = self.in_checkpoint
            return self.in_checkpoint

        def calibrate(loss_of, ids):
            assert torch.is_grad_enabled()
            self.events.append("calibrate")

        made.take, made.calibrate = take, calibrate
        return made

    def loss(self, model, ids, is_first_microbatch, scale):
        self.events.append("loss")
        return torch.ones(())


@pytest.mark.parametrize(("in_checkpoint", "found"), [(True, ["take"]), (False, ["take", "calibrate"])])
def test_a_validation_that_comes_first_has_its_scales(in_checkpoint, found):
    """After a run that ended between its last step and the validation that was due."""
    (config,) = compose.preflight(["model.n_layer=1", "micro_batch_size=1", "precision.evaluation=fp8"])
    events = []
    plan = Plan("cpu", "fp8_hybrid", "fp8_hybrid", None, Backend(config, events, in_checkpoint))
    module = GPT2Module(config, 257)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    module._trainer = SimpleNamespace(precision_plugin=RunPrecision(plan), strategy=strategy, sanity_checking=False)
    module.configure_model()
    with torch.no_grad():
        module.on_validation_epoch_start()
        for _ in range(2):
            module.validation_step({"ids": IDS}, 0)
    assert events == [*found, "loss", "loss"]
    (sums,) = module._validation._sums
    assert sums.tolist() == [2 * 256, 2 * 256]
    assert module.step.scaling.ready

"""A run that takes itself for one in FP8 and computes in bf16, so that a step run again leaves no trace; its faults."""

import math
from contextlib import contextmanager, nullcontext

import pytest
import torch

from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.fp8.backends import Reference
from gpt2_fp8.fp8.base import Backend
from gpt2_fp8.fp8.resolve import Plan, resolve
from gpt2_fp8.fp8.scaling import FP8Scaling
from gpt2_fp8.train import fit
from gpt2_fp8.train.module import GPT2Module

NAN = float("nan")


class Pretended(Reference):
    """bf16 autocast on a CPU, which takes itself for FP8."""

    def __init__(self, config, ran="fp8_hybrid", device="cpu"):
        super().__init__(config, ran, device)
        self.compiled = False

    def scaling(self, model):
        return FP8Scaling(model, None, self.config.global_batch_size, nullcontext)

    def loss(self, model, ids, is_first_microbatch, scale):
        return Backend.loss(self, model, ids, is_first_microbatch, scale)  # FP8 layers need the flag


def pretended(config):
    name = config.precision.name if config.precision.name.startswith("fp8") else "fp8_hybrid"
    return Plan("cpu", name, name, None, Pretended(config, name))


def _plan(config, device):
    return pretended(config) if config.precision.name.startswith("fp8") else resolve(config, device)


def pretend(patch):
    """Until `patch` is undone, a precision of FP8 runs here."""
    patch.setattr(fit, "resolve", _plan)


class Faults:
    """What multiplies the loss, and a gradient, of a pass: of step (from 1) and precision ("fp8", "bf16" or "fp32")."""

    def loss(self, module, step, precision):
        return 1.0

    def gradient(self, module, step, precision):
        return 1.0

    def before(self, module, step):
        pass

    def after(self, module, step):
        pass


class NanLoss(Faults):
    """A loss that is NaN in these steps, in this precision or in any."""

    def __init__(self, *steps, precision=None):
        self.steps, self.precision = steps, precision

    def loss(self, module, step, precision):
        return NAN if step in self.steps and self.precision in (None, precision) else 1.0


class InFP8Alone(NanLoss):
    """A loss that is NaN in step 3, a gradient that is infinite in step 5."""

    def __init__(self):
        super().__init__(3, precision="fp8")

    def gradient(self, module, step, precision):
        return math.inf if (step, precision) == (5, "fp8") else 1.0


class NanWeight(Faults):
    """Once: a weight is NaN after the update of step 6, which is then saved."""

    happened = False

    def after(self, module, step):
        if step == 6 and not self.happened:
            self.happened = True
            with torch.no_grad():
                module.model.positions.weight[0, 0] = NAN


def put(faults, patch):
    """Have `faults` happen until `patch` is undone."""
    present = {}
    training_step = GPT2Module.training_step

    def step(self, batch, batch_idx):
        present["module"], present["step"] = self, self.global_step + 1
        faults.before(self, present["step"])
        training_step(self, batch, batch_idx)
        faults.after(self, present["step"])

    def spoiled(name):
        original = getattr(Gradients, name)

        def gradients(self, *args, **kwargs):
            loss = original(self, *args, **kwargs)
            of_bf16 = name == "of_step_in_bf16"
            precision = "bf16" if of_bf16 else "fp8" if self.plan.fp8 else self.plan.ran
            module = present["module"]
            ahead = not of_bf16 and module.step._unsettled is not None
            where = module, module.step.schedule.last_epoch + 1 + ahead, precision
            if (factor := faults.gradient(*where)) != 1:
                self.model.positions.weight.grad[0, 0] *= factor
            return loss * faults.loss(*where)

        return gradients

    patch.setattr(GPT2Module, "training_step", step)
    for name in ("of_step", "of_step_in_bf16"):
        patch.setattr(Gradients, name, spoiled(name))


@contextmanager
def going_wrong(faults, fp8=True):
    """Runs within have these faults, and run in pretended FP8 where that is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        if fp8:
            pretend(patch)
        put(faults, patch)
        yield patch

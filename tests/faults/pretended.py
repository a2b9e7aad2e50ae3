"""FP8 where there is none: a run that takes itself for one in FP8 and computes in bf16, and faults to put into it.

What it computes in "FP8" and what it computes again in bf16 is the same arithmetic, so that a step which was run again
leaves no trace: a run with such steps must equal one without, bit for bit.
"""

import math
from contextlib import contextmanager

import pytest
import torch

from gpt2_fp8.engine import engine
from gpt2_fp8.engine.engine import Engine
from gpt2_fp8.precision.plugin import BF16Precision, FP8Precision, build_plugin
from gpt2_fp8.precision.resolve import Plan, resolve
from gpt2_fp8.train import build, fit
from gpt2_fp8.train.module import GPT2Module

NAN = float("nan")


class Pretended(FP8Precision):
    """bf16 autocast on a CPU."""

    def __init__(self):
        super().__init__(None, None)
        self.device = "cpu"

    forward_context = BF16Precision.forward_context


def _plan(config, device):
    name = config.precision.name
    if name.startswith("fp8"):
        return Plan("cpu", name, name, None, "reference", compile=False)
    return resolve(config, device)


def pretend(patch):
    """Until `patch` is undone, a precision of FP8 runs here."""
    plain = engine.cross_entropy
    patch.setattr(fit, "resolve", _plan)
    patch.setattr(build, "build_plugin", lambda config, plan: Pretended() if plan.fp8 else build_plugin(config, plan))
    patch.setattr(engine, "cross_entropy", lambda *args: plain(*args[:3], False, *args[4:]))


class Faults:
    """What is to go wrong, by a function of (module, step from 1, precision of the pass: "fp8", "bf16" or "fp32").

    `loss(...)` and `gradient(...)` are called after every computation of a step's gradients: what the first returns
    multiplies the loss that is reported, and the gradients where the second says so. `after(module, step)` is called
    after the step.
    """

    def loss(self, module, step, precision):
        return 1.0

    def gradient(self, module, step, precision):
        return 1.0

    def before(self, module, step):
        pass

    def after(self, module, step):
        pass


class InFP8Alone(Faults):
    """A loss that is NaN in step 3, a gradient that is infinite in step 5."""

    def loss(self, module, step, precision):
        return NAN if (step, precision) == (3, "fp8") else 1.0

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
        original = getattr(Engine, name)

        def gradients(self, *args, **kwargs):
            loss = original(self, *args, **kwargs)
            of_bf16 = name == "gradients_in_bf16"
            precision = "bf16" if of_bf16 else "fp8" if self.plan.fp8 else self.plan.ran
            where = present["module"], present["step"], precision
            if (factor := faults.gradient(*where)) != 1:
                self.model.positions.weight.grad[0, 0] *= factor
            return loss * faults.loss(*where)

        return gradients

    patch.setattr(GPT2Module, "training_step", step)
    for name in ("gradients", "gradients_in_bf16"):
        patch.setattr(Engine, name, spoiled(name))


@contextmanager
def going_wrong(faults, fp8=True):
    """Runs within have these faults, and run in pretended FP8 where that is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        if fp8:
            pretend(patch)
        put(faults, patch)
        yield patch

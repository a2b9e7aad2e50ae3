"""The precision plugin for Lightning, the same for every backend.

Lightning wraps a whole `training_step` in `train_step_context`. With manual optimization that step holds several
forwards, backwards and the update. Transformer Engine wants each forward in a region of its own, since leaving the
region is what updates the scales, and backward outside of it. So Lightning's contexts do nothing here, and each forward
enters the backend's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from gpt2_fp8.backends.resolve import Plan, resolve
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import devices


class FP8Precision(MixedPrecision):
    """float32 weights; activations and matrix products as the plan's backend computes them: FP8, bf16 or float32.

    For `Trainer(plugins=[...])`. Attributes: `plan`, which the module reads.
    """

    def __init__(self, plan: Plan):
        super().__init__("bf16-mixed", plan.device)
        self.plan = plan

    @classmethod
    def from_config(cls, config: RunConfig) -> FP8Precision:
        """Build the plugin of a configuration for this machine: a GPU if there is one, unless it says otherwise.

        Raises UserError if this machine cannot compute what was asked for, and no fallback is allowed.
        """
        return cls(resolve(config, devices.device(config)))

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return a `GPT2Module` unchanged. Raises UserError for any other: it would not enter the precision."""
        if not isinstance(getattr(module, "config", None), RunConfig):
            cause = f"FP8Precision computes a GPT2Module, and {type(module).__name__} would compute in float32"
            raise UserError.of(cause, "Trainer(precision='bf16-mixed')")
        return module

    def forward_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Enter the precision of one forward."""
        return self.plan.backend.forward_context()

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Do nothing: see the module."""
        yield

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        """Do nothing: see the module."""
        yield

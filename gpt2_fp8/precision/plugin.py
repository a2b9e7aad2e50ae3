"""The precision plugin that Lightning is given, whatever computes.

Lightning wraps a whole `training_step` in `train_step_context`. With manual optimization that step holds several
forwards, backwards and the update. Transformer Engine wants each forward in a region of its own, since leaving the
region is what updates the scales, and backward outside of it. So Lightning's contexts do nothing here, and each forward
enters the backend's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

from lightning.pytorch.plugins.precision import MixedPrecision


class Computes(Protocol):
    """What the plugin has to know of a run's plan: see `backends.resolve.Plan`."""

    @property
    def device(self) -> Literal["cuda", "cpu"]: ...

    @property
    def backend(self) -> Any: ...


class FP8Precision(MixedPrecision):
    """float32 weights; activations and matrix products as the plan's backend computes them: FP8, bf16 or float32.

    For `Trainer(plugins=[...])`. Attributes: `plan`, which the module reads.
    """

    def __init__(self, plan: Computes):
        super().__init__("bf16-mixed", plan.device)
        self.plan = plan

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

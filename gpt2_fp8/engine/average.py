"""The exponential moving average (EMA) of a model's weights, with which it is evaluated. Plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from gpt2_fp8.runtime import sharding


class WeightAverage:
    """Averages weights over steps, in float32: average = decay * average + (1 - decay) * weights.

    Up to `start_step` the average is the weights themselves. It is taken element by element, so ranks of equal weights
    have equal averages, and a rank of a divided model averages its own rows. Nothing is communicated.

    Args:
        model: its parameters are where they will be trained.
        decay: from 0 to below 1; None: there is no average, and evaluations have the weights.
        start_step: the last step whose weights are copied.

    Attributes:
        exists: whether there is one.
    """

    def __init__(self, model: nn.Module, decay: float | None, start_step: int) -> None:
        self._model, self._start_step, self.exists = model, start_step, decay is not None
        self._weights = dict(model.named_parameters())  # of a divided model this rank's rows, now
        self._values: dict[str, Tensor] = {}  # this rank's
        self._average = get_ema_multi_avg_fn(decay or 0.0)

    def _own(self) -> list[Tensor]:
        """Return what this rank has of the weights, as views."""
        return [sharding.local(weight.detach()) for weight in self._weights.values()]

    def begin(self) -> None:
        """Begin with the present weights, unless there is an average already."""
        if self.exists and not self._values:
            self._values = {name: own.clone() for name, own in zip(self._weights, self._own(), strict=True)}

    def update(self, step: int) -> None:
        """Add the weights after `step`."""
        if self._values and step > self._start_step:
            self._average(list(self._values.values()), self._own(), step)
            return
        for name, value in self._values.items():
            value.copy_(sharding.local(self._weights[name].detach()))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the parameters hold the average, and afterwards the weights again, to the last bit.

        Their storage stays: CUDA graphs have its address. Layers that keep FP8 copies of weights quantize again in
        each evaluation, and in a step's first micro-batch.
        """
        if not self._values:
            yield
            return
        largest = max(self._values.values(), key=Tensor.numel)
        scratch = torch.empty_like(largest).flatten()  # first, and kept: memory may run out, but not half way
        self._exchange(scratch)
        try:
            yield
        finally:
            self._exchange(scratch)

    def _exchange(self, scratch: Tensor) -> None:
        sharding.free_gathered(self._model)
        for own, value in zip(self._own(), self._values.values(), strict=True):
            before = scratch[: own.numel()].view_as(own).copy_(own)
            own.copy_(value)
            value.copy_(before)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average by the names of parameters; of a divided model as tensors divided alike."""
        return {
            name: sharding.divided(value, weight) if isinstance(weight := self._weights[name], DTensor) else value
            for name, value in self._values.items()
        }

    def load_state_dict(self, saved: Mapping[str, Tensor] | None) -> None:
        """Continue from what `state_dict` has returned; None: from the weights at `begin`."""
        self._values = {}
        if self.exists and saved is not None:
            named = zip(self._weights, self._own(), strict=True)
            self._values = {name: torch.empty_like(own).copy_(sharding.local(saved[name])) for name, own in named}

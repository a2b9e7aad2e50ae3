"""Small tensors on their way from the device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpt2_fp8.runtime.moments import Moment


class Sent:
    """A copy of a tensor's values that travels to the host. To read it waits for what was launched before it alone.

    `tolist` of a tensor on a GPU waits for everything that was launched until then. Make it on the tensor's stream.

    Attributes:
        arrival: the moment at which the values are there; over once they are read.
    """

    def __init__(self, values: Tensor):
        self._values: Tensor | None = values
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        self.arrival = Moment(values.device)
        self._read: Any = None

    def read(self) -> Any:
        """Wait for the values and return them, as `Tensor.tolist` does."""
        if self._values is not None:
            self.arrival.wait()
            self._read, self._values = self._values.tolist(), None  # pinned memory is free for the next one
        return self._read

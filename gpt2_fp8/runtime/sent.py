"""Small tensors on their way from the device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Sent:
    """A copy of a tensor's values that travels to the host. To read it waits for what was launched before it alone.

    `tolist` of a tensor on a GPU waits for everything that was launched until then. Make it on the tensor's stream.
    """

    def __init__(self, values: Tensor):
        self._event: torch.cuda.Event | None = None
        self._values: Tensor | None = values
        self._read: Any = None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Any:
        """Wait for the values and return them, as `Tensor.tolist` does."""
        if self._values is not None:
            if self._event is not None:
                self._event.synchronize()
            self._read, self._values = self._values.tolist(), None  # pinned memory is free for the next one
        return self._read

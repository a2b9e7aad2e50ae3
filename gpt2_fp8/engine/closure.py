"""The closure that `torch.optim.Optimizer.step` may be given: Lightning's holds a whole training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Call a closure with gradients, and return its loss; None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()

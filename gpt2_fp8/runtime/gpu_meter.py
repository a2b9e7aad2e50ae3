"""The power and the utilisation of this process' GPU, as NVIDIA's driver tells them."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)


class GPUMeter:
    """Asks the driver, not the GPU: nothing waits for a kernel. What it cannot be asked for is left out.

    It needs the library `nvidia-ml-py`, and a driver that answers: in some containers it does not.
    """

    def __init__(self) -> None:
        self._works = True

    def read(self) -> dict[str, float]:
        """Return watts, and the part of the last moment (0 to 1) in which a kernel ran; nothing if that is unknown."""
        if not self._works:
            return {}
        try:
            return {
                "gpu_power_watts": torch.cuda.power_draw() / 1000,
                "gpu_utilization": torch.cuda.utilization() / 100,
            }
        except Exception as error:  # pynvml's errors are classes of its own, and pynvml may not be there
            log.debug("no power and utilisation of the GPU in the log: %s", error)
            self._works = False
            return {}

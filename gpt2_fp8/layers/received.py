"""The gradient of a block's output in FP8, written by the block above, kept until this block's backward needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from gpt2_fp8.kernels.layer_norm import LayerNormGradient


class Received:
    """A gradient as the block above computed and quantized it.

    Autograd may hand on another gradient: the sum with that of a second use, or what a hook made of it, even in place.
    """

    def __init__(self, gradient: LayerNormGradient):
        self.gradient, self._version = gradient, gradient.dx._version

    def is_of(self, dout: Tensor) -> bool:
        """Return whether this is the gradient `dout` [M, d]: the same memory, whole, and not written to since."""
        dx = self.gradient.dx
        same = (dx.data_ptr(), dx.shape, self._version) == (dout.data_ptr(), dout.shape, dout._version)
        return same and dx._version == self._version

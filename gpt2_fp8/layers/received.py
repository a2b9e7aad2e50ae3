"""The gradient of a block's output, cast to FP8 by the block above, until this block's backward asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from gpt2_fp8.kernels.layer_norm import LayerNormGradient


class Received:
    """A gradient as the block above has computed and cast it. What autograd hands on may be another one: the sum with
    that of a second use, or what a hook has made of it, also in its place in memory."""

    def __init__(self, gradient: LayerNormGradient):
        self.gradient, self._version = gradient, gradient.dx._version

    def is_of(self, dout: Tensor) -> bool:
        """Whether the cast is that of `dout` [M, d]: the same memory, whole, and not written to since."""
        dx = self.gradient.dx
        same = (dx.data_ptr(), dx.shape, self._version) == (dout.data_ptr(), dout.shape, dout._version)
        return same and dx._version == self._version

"""The head of the emulated layers: the last normalisation, the GEMM with the embedding, and the loss.

As in the fused layers (`layers.head_chunks.of_probabilities`), probabilities go from the GEMM's float32 sums to E5M2,
under every recipe and format. No scale must be found: see `layers.emulated_probabilities`. Two of its results belong to
the rows. The factors multiply the rows of dgrad's result, and those of the head's input before wgrad's cast, whose
amax does not count them. What E5M2 lacks at a row's target is added to both results (`kernels.target_rows`). The loss's
divisor goes into the scale of the GEMMs, with what rounding takes from a row's sum (`kernels.rounding`).

Without a cast of the gradient, it and the loss come from logits in bfloat16, as in the plain-torch layers. So does the
loss without gradients.

Shapes: M = batch * tokens rows, d = n_embd, N = padded_vocab_size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2_fp8.config.block_spec import Norm
from gpt2_fp8.config.schema import PenaltyConfig
from gpt2_fp8.layers.delayed_scaling import Place
from gpt2_fp8.layers.emulated_gemm import (
    NO_SLOTS,
    Casts,
    Emulation,
    Slots,
    cast_forward,
    linear,
    product,
    round_to_bf16,
    rounded_product,
    weight_gradient,
    without_autocast,
)
from gpt2_fp8.layers.emulated_probabilities import GRADIENT, MEAN, UNIT, Penalty, gradient, softmax, stored
from gpt2_fp8.layers.emulated_scales import EmulatedScales
from gpt2_fp8.layers.fp8_cast import Operand, cast, uncast
from gpt2_fp8.layers.reference import LayerNormLinear


class Head(LayerNormLinear):
    """The last normalisation and the GEMM with the embedding. `loss` trains; `forward` gives logits."""

    def __init__(
        self, n_embd: int, padded_vocab_size: int, norm: Norm, emulation: Emulation, scales: EmulatedScales | None
    ):
        super().__init__(n_embd, padded_vocab_size, norm, bias=False)
        self.casts, self.scales = emulation.head_casts(GRADIENT), [scales]  # in a list: the model registers it
        self.places: dict[str, Place] = {}
        if scales is not None:
            self.places = {name: scales.reserve("forward") for name in ("input", "weight")}

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute logits, bfloat16 [batch, tokens, N], without gradients. x: [batch, tokens, d]."""
        with torch.no_grad():
            y = linear(self._normalise(x), self.weight, None, self.casts, self._slots(), rounded=True)
        return y.to(torch.bfloat16)

    def loss(
        self, x: Tensor, targets: Tensor, vocab_size: int, scale: float, is_first_microbatch: bool | None,
        penalty: PenaltyConfig | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute `scale` times the mean cross-entropy over targets [batch, tokens] that are not negative; float32.

        With penalties on the logits it is [3]: what is trained, the cross-entropy, and the penalties. Only the first
        has a gradient.
        """
        rows, targets = self._normalise(x).flatten(0, 1), targets.flatten()
        weight = scale / torch.count_nonzero(targets >= 0).clamp_min(1)
        slots = self._slots()
        on_logits = (penalty.z_loss, penalty.logit_l2) if penalty and penalty.of_logits else None
        is_cast = self.casts.dgrad_gradient is not None or self.casts.wgrad_gradient is not None
        # inside a Function gradients are always off
        how = _How(self.casts, vocab_size, on_logits, stored=is_cast and torch.is_grad_enabled())
        return _Loss.apply(rows, self.weight, slots.forward, slots.seen_forward, targets, weight.float(), how)

    def _slots(self) -> Slots:
        (scales,) = self.scales
        return NO_SLOTS if scales is None else scales.slots(self.places["input"], None)

    def _normalise(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16).to(x.dtype)  # it holds no more than bfloat16's numbers; nor shall its gradient
        return F.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.epsilon).float()


class _How(NamedTuple):
    """What `_Loss` does with its tensors."""

    casts: Casts
    vocab_size: int
    penalty: Penalty
    stored: bool  # whether there will be a gradient of the logits that is cast for a GEMM


class _Loss(torch.autograd.Function):
    """Logits and their cross-entropy; the backward casts the logits' gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, scale: Tensor | None, seen: Tensor | None, targets: Tensor,
        divisor: Tensor, how: _How,
    ) -> Tensor:  # fmt: skip
        with without_autocast(y):
            inputs, w, amaxes = cast_forward(y, weight, how.casts, scale)
            logits = product(inputs.fprop, w.t())
            logits = logits if how.stored else logits.to(torch.bfloat16)
            real = logits[:, : how.vocab_size].float()
            total = F.cross_entropy(real, targets, ignore_index=-1, reduction="sum")
        kept = inputs.wgrad
        operands = kept.values, kept.scale_inv, w.values, w.scale_inv
        ctx.save_for_backward(logits, targets, divisor, *operands, amaxes, y if how.stored else None, scale)
        ctx.how = how
        if how.penalty is None:
            return total * divisor
        z_loss, logit_l2 = how.penalty
        of_rows = z_loss * real.logsumexp(1).square() + logit_l2 * real.square().mean(1)
        penalties = torch.where(targets >= 0, of_rows, 0.0).sum()
        return torch.stack([total + penalties, total, penalties]) * divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, divisor, y_values, y_scale_inv, w_values, w_scale_inv, amaxes, rows, scale = ctx.saved_tensors
        how: _How = ctx.how
        casts = how.casts
        y = Operand(y_values, y_scale_inv, casts.wgrad_input is not None)
        w = Operand(w_values, w_scale_inv, casts.weight is not None)
        counts = (upstream[0] if how.penalty is None else upstream[0][0]) * divisor
        with without_autocast(logits):
            p = softmax(logits, how.vocab_size, how.penalty)
            dy = dw = None
            if how.stored:
                q, factors, rest = stored(p, logits, targets)
                in_fp8, rest, at = Operand(q, counts / (UNIT * MEAN), True), rest * counts, targets.clamp_min(0)
                if casts.dgrad_gradient is not None:
                    dy = round_to_bf16(rounded_product(in_fp8, w) * factors + rest * _numbers(w)[at])
                if casts.wgrad_gradient is not None:
                    times = cast(rows * factors, casts.wgrad_input, None if scale is None else scale[0])
                    dw = weight_gradient(in_fp8, times).index_add(0, at, rest * _numbers(y))
            if dy is None or dw is None:
                in_bf16 = uncast(gradient(p, targets, logits.shape[1]) * counts)
                dy = rounded_product(in_bf16, w) if dy is None else dy
                dw = weight_gradient(in_bf16, y) if dw is None else dw
        return dy, dw, None, amaxes, None, None, None


def _numbers(x: Operand) -> Tensor:
    """Return an operand's numbers, float32."""
    return x.values.float() * (1.0 if x.scale_inv is None else x.scale_inv)

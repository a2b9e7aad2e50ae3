"""The head of the emulated layers: the last normalisation, the GEMM with the embedding, and the loss.

As in the fused layers (`layers.head`), the logits' gradient is (softmax - onehot) times 2^15 in E5M2, under every
recipe and format. No scale must be found, since its values lie in [-1, 1]. The loss's divisor goes into the scale of
the GEMMs instead, with what rounding takes from a row's sum (`kernels.rounding`). What it takes from the gradient of a
row's target is added to their results (`kernels.target_rows`). With a backward in bf16, the gradient is in bfloat16.

Penalties change the gradient to softmax (1 + 2 z lse) - onehot + 2 l x / vocabulary, where lse is the logarithm of a
row's sum of exponentials. It is cast with the same factor, and saturates as `kernels.softmax_cast` says.

Shapes: M = batch * tokens rows, d = n_embd, N = padded_vocab_size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2_fp8.config.block_spec import Norm
from gpt2_fp8.config.schema import PenaltyConfig
from gpt2_fp8.kernels.rounding import mean_of_rounded
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
from gpt2_fp8.layers.emulated_scales import EmulatedScales
from gpt2_fp8.layers.fp8_cast import Operand, saturated, uncast
from gpt2_fp8.layers.reference import LayerNormLinear

GRADIENT, FACTOR = torch.float8_e5m2, 2.0**15
MEAN = mean_of_rounded(GRADIENT)


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
        return _Loss.apply(
            rows, self.weight, slots.forward, slots.seen_forward, targets, weight.float(), self.casts, vocab_size,
            on_logits,
        )  # fmt: skip

    def _slots(self) -> Slots:
        (scales,) = self.scales
        return NO_SLOTS if scales is None else scales.slots(self.places["input"], None)

    def _normalise(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16).to(x.dtype)  # it holds no more than bfloat16's numbers; nor shall its gradient
        return F.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.epsilon).float()


class _Loss(torch.autograd.Function):
    """Logits and their cross-entropy; the backward casts the logits' gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, scale: Tensor | None, seen: Tensor | None, targets: Tensor,
        divisor: Tensor, casts: Casts, vocab_size: int, penalty: tuple[float, float] | None,
    ) -> Tensor:  # fmt: skip
        with without_autocast(y):
            inputs, w, amaxes = cast_forward(y, weight, casts, scale)
            logits = product(inputs.fprop, w.t()).to(torch.bfloat16)
            real = logits[:, :vocab_size].float()
            total = F.cross_entropy(real, targets, ignore_index=-1, reduction="sum")
        kept = inputs.wgrad
        ctx.save_for_backward(logits, targets, divisor, kept.values, kept.scale_inv, w.values, w.scale_inv, amaxes)
        ctx.vocab_size, ctx.casts, ctx.penalty = vocab_size, casts, penalty
        if penalty is None:
            return total * divisor
        of_rows = penalty[0] * real.logsumexp(1).square() + penalty[1] * real.square().mean(1)
        penalties = torch.where(targets >= 0, of_rows, 0.0).sum()
        return torch.stack([total + penalties, total, penalties]) * divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, divisor, y_values, y_scale_inv, w_values, w_scale_inv, amaxes = ctx.saved_tensors
        casts: Casts = ctx.casts
        y = Operand(y_values, y_scale_inv, casts.wgrad_input is not None)
        w = Operand(w_values, w_scale_inv, casts.weight is not None)
        given = upstream[0] if ctx.penalty is None else upstream[0][0]
        g, factor = _gradient(logits, targets, ctx.vocab_size, ctx.penalty), given * divisor
        in_fp8 = Operand(saturated(g * FACTOR, GRADIENT), factor / (FACTOR * MEAN), True)
        in_bf16 = uncast(g * factor)
        rest, at = _rest(g, targets)
        rest = rest * factor
        with without_autocast(logits):
            if casts.dgrad_gradient is None:
                dy = rounded_product(in_bf16, w)
            else:
                dy = round_to_bf16(product(in_fp8, w) + rest * _numbers(w)[at])
            if casts.wgrad_gradient is None:
                dw = weight_gradient(in_bf16, y)
            else:
                dw = weight_gradient(in_fp8, y).index_add(0, at, rest * _numbers(y))
        return dy, dw, None, amaxes, None, None, None, None, None


def _rest(g: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what the cast gradient lacks at each row's target, float32 [M, 1], and the targets.

    Rows without one get a 0 for the id 0.
    """
    at = targets.clamp_min(0)
    exact = g.gather(1, at[:, None])
    return exact - saturated(exact * FACTOR, GRADIENT).float() / (FACTOR * MEAN), at


def _numbers(x: Operand) -> Tensor:
    """Return an operand's numbers, float32."""
    return x.values.float() * (1.0 if x.scale_inv is None else x.scale_inv)


def _gradient(logits: Tensor, targets: Tensor, vocab_size: int, penalty: tuple[float, float] | None) -> Tensor:
    """Compute softmax(logits) - onehot(targets), float32 [M, N], or with the penalties z-loss and L2, by their weights.

    It is 0 in rows whose target is negative and in columns from `vocab_size` on.
    """
    real = logits[:, :vocab_size].float()
    p = torch.softmax(real, 1)
    columns = torch.arange(vocab_size, device=logits.device)
    if penalty is not None:
        z_loss, logit_l2 = penalty
        p = p * (1 + 2.0 * z_loss * real.logsumexp(1, keepdim=True)) + 2.0 * logit_l2 / vocab_size * real
    p = torch.where(columns == targets[:, None], p - 1, p)
    p = p * (targets >= 0)[:, None]
    return F.pad(p, (0, logits.shape[1] - vocab_size))

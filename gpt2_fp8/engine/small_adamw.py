"""AdamW whose moments are in bfloat16.

The update is torch's AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), in float32. Only what is kept of the two
moments is rounded, after the weights have been updated with the exact ones:

    exp_avg       to nearest: it changes by a tenth a step, so nothing stays behind
    exp_avg_sq    stochastically

With `beta2` = 0.999 it changes by a thousandth a step, and bfloat16 has eight bits: rounded to nearest, it would never
fall. Stochastic rounding goes up with the probability of the distance from below, so its mean is exact (Croci et al.
2022). The random bits depend on the run's seed, the parameter's name, the number of updates and the element's index. So
they need no state, and are the same after a resume, on every rank and on every device. They come from MurmurHash3's
32-bit finalizer (Appleby 2011), applied twice with two keys.

On CUDA a parameter's update is one kernel, which reads and writes each number once (`kernels.adamw`). On a CPU it is
plain torch, with the same bits for the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt2_fp8.compat.torch_private import add_to_all, skips_where
from gpt2_fp8.runtime.sharding import local
from gpt2_fp8.runtime.sharding import rows as rows_of

T = TypeVar("T", int, Tensor)
_CHUNK = 1 << 18  # elements that plain torch updates at a time
_WORD = 0xFFFFFFFF
_LOW = 0xFFFF  # the bits of a float32 that a bfloat16 does not have


class Keys(NamedTuple):
    """Two keys of 32 bits each."""

    first: int
    second: int

    @classmethod
    def of(cls, seed: int, name: str) -> Keys:
        """Return the keys of a parameter in a run."""
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))

    def at(self, update: int) -> Keys:
        """Return the keys of one update, which is counted from 1."""
        return Keys(
            murmur3(self.first ^ murmur3(update)),
            murmur3((self.second + update * 0x9E3779B9) & _WORD),
        )


class Scalars(NamedTuple):
    """What is the same for all elements of a parameter."""

    decay: float  # 1 - lr weight_decay
    beta1: float
    beta2: float
    eps: float
    row: Tensor  # float32 [4]: lr / (1 - beta1^t), sqrt(1 - beta2^t), t, 0


class SmallAdamW(Optimizer):
    """AdamW with moments in bfloat16. Each group has `lr`, `betas`, `eps` and `weight_decay`.

    If what `skip_where` has told it is 1, a step changes nothing, and the host does not wait to know.

    Args:
        groups: parameters in float32, contiguous.
        keys: of each parameter, for the random bits.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], keys: Mapping[Tensor, Keys]):
        super().__init__(groups, {})
        self._keys = dict(keys)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if parameters := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {"step": torch.zeros((), device=parameter.device)} | new_moments(parameter)
        on_cuda, skip = parameters[0].is_cuda, skips_where(self)
        if not on_cuda and skip is not None and skip.item():  # on a CPU nothing is waited for
            return
        steps = [self.state[parameter]["step"] for parameter in parameters]
        add_to_all(steps, 1 if skip is None or not on_cuda else 1 - skip.reshape(()))
        rows = _rows(steps, group["lr"], group["betas"])
        (beta1, beta2), decay = group["betas"], 1 - group["lr"] * group["weight_decay"]
        for parameter, row in zip(parameters, rows, strict=True):
            assert parameter.is_contiguous()
            own, gradient, keys = local(parameter.detach()), local(parameter.grad).contiguous(), self._keys[parameter]
            if not own.numel():  # of a model that is divided among more ranks than it has rows
                continue
            state = {name: local(tensor) for name, tensor in self.state[parameter].items()}
            first = rows_of(parameter).start * (own.numel() // len(own))
            scalars = Scalars(decay, beta1, beta2, group["eps"], row)
            if on_cuda:
                from gpt2_fp8.kernels.adamw import update

                update(own, gradient, state, keys, scalars, skip, first)
            else:
                update_plain(own, gradient, state, keys, scalars, first)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state. torch's own would make every moment float32."""
        saved = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, own, strict=True):
            if index in saved:
                self.state[parameter] = {
                    name: tensor.detach().to(parameter.device, copy=True) for name, tensor in saved[index].items()
                }


def new_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter's moments before its first update: all 0, on its device."""
    return {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}


def update_plain(
    parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], keys: Keys, scalars: Scalars, first: int = 0
) -> None:
    """Update one parameter and its moments in plain torch, a part at a time. `first`: see `kernels.adamw.update`.

    Each product and each sum is rounded by itself, as in `kernels.adamw`.
    """
    weights, mean, squares = (x.view(-1) for x in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]))
    now = keys.at(int(scalars.row[2].item()))
    for start in range(0, len(weights), _CHUNK):
        part = slice(start, min(start + _CHUNK, len(weights)))
        p, g = weights[part], gradient.view(-1)[part]
        m = mean[part].float() * scalars.beta1 + g * (1 - scalars.beta1)
        v = squares[part].float() * scalars.beta2 + (g * g) * (1 - scalars.beta2)
        root = v.double().sqrt().float()  # rounded to nearest, which float32's own root is not on every CPU
        p.mul_(scalars.decay).sub_(m / (root / scalars.row[1] + scalars.eps) * scalars.row[0])
        mean[part] = m.to(torch.bfloat16)
        squares[part] = round_stochastically(v, random_bits(now, first + start, len(p), p.device))


def _rows(steps: Sequence[Tensor], lr: float, betas: tuple[float, float]) -> Tensor:
    """Compute each parameter's `Scalars.row` on its device: float32 [parameters, 4]."""
    t = torch.stack(list(steps)).double()
    sizes, roots = lr / (1 - betas[0] ** t), (1 - betas[1] ** t).sqrt()
    return torch.stack([sizes, roots, t, torch.zeros_like(t)], 1).float()


def murmur3(x: T) -> T:
    """Compute MurmurHash3's finalizer of 32-bit numbers: an int, or int64. A product keeps its low 32 bits."""
    x = ((x ^ x >> 16) * 0x85EBCA6B) & _WORD
    x = ((x ^ x >> 13) * 0xC2B2AE35) & _WORD
    return x ^ x >> 16


def random_bits(keys: Keys, start: int, count: int, device: torch.device) -> Tensor:
    """Compute the random words of the elements from `start` on: int64 [count], each from 0 to 2^32 - 1.

    They repeat after 2^32 elements.
    """
    x = torch.arange(start, start + count, dtype=torch.int64, device=device) & _WORD
    return murmur3((murmur3(x ^ keys.first) + keys.second) & _WORD)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 by the low 16 of the random `bits`, int64 of the same shape. Values must be finite."""
    noise = (bits & _LOW).to(torch.int32)
    return ((values.view(torch.int32) + noise) & ~_LOW).view(torch.float32).to(torch.bfloat16)

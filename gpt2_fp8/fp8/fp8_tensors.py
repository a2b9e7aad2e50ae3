"""Which tensors of a run's model are in FP8, in which format, and what delayed scaling has stored of each.

That is its newest amax, its scale, and the age of what decided it. `fp8.state` has the layout. Reading takes a few
launches and one copy to the host, and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpt2_fp8.config.kept_layers import MLP, PARTS, parse_kept
from gpt2_fp8.config.schema import FP8PrecisionConfig
from gpt2_fp8.fp8.recipes import formats
from gpt2_fp8.fp8.state import BACKWARD, FORWARD, ScalingState, TEState, states_of
from gpt2_fp8.kernels.formats import HEAD_GRADIENT, LARGEST
from gpt2_fp8.layers.block import product_place
from gpt2_fp8.layers.delayed_scaling import LARGEST_SCALE
from gpt2_fp8.runtime.moments import Sent

Kind = Literal["input", "weight", "gradient"]
KINDS: tuple[Kind, ...] = ("input", "weight", "gradient")
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
HEAD = "head"


@dataclass(frozen=True)
class FP8Tensor:
    """One FP8 tensor of a model.

    Attributes:
        layer: its name in `precision.keep_bf16`: blocks.3.fc1, or head.
        kind: the layer's input, its weight, or the gradient of its output.
        dtype: the format, a float8 dtype.
    """

    layer: str
    kind: Kind
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"the {self.kind} of {self.layer}"

    @property
    def of_logits(self) -> bool:
        """Whether it is the gradient of the logits. Much of that is 0 in any run: the probabilities of rare tokens."""
        return (self.layer, self.kind) == (HEAD, "gradient")

    @property
    def format(self) -> str:
        """The format's name: e4m3 or e5m2."""
        return FORMATS[self.dtype]


def fp8_tensors(precision: FP8PrecisionConfig, n_layer: int) -> list[FP8Tensor]:
    """List the FP8 tensors of a model of `n_layer` blocks, layer after layer. An emulated head is in bf16.

    A backward in bf16 has no FP8 gradient; under bf16_wgrad the other product of the backward still has.
    """
    in_bf16 = parse_kept(precision.keep_bf16, n_layer)
    forward, gradient = formats(precision)
    layers = [(f"blocks.{i}.{part}", gradient) for i in range(n_layer) for part in PARTS if part in in_bf16.in_fp8(i)]
    if not in_bf16.head and precision.backend != "emulated":
        layers.append((HEAD, HEAD_GRADIENT))
    return [
        FP8Tensor(layer, kind, back if kind == "gradient" else forward)
        for layer, back in layers
        for kind in KINDS
        if not (kind == "gradient" and precision.backward == "bf16")
    ]


@dataclass(frozen=True)
class Stored:
    """What is stored of one tensor, on the host.

    Attributes:
        amax: the largest absolute value in the newest step; over all ranks and micro-batches.
        scale: the factor that was stored after that step. The fused and the emulated layers have quantized the step
            with it; Transformer Engine's layers quantize the next one with it.
        age: steps since the largest amax of the history.
    """

    amax: float
    scale: float
    age: int


class StoredScales:
    """Reads the scales of `tensors` in `model`, a `GPT2` of any family.

    Attributes:
        found: those of `tensors` that have a stored scale; none before the first FP8 forward of Transformer Engine's
            layers, and none under recipes without stored scales.
    """

    def __init__(self, model: nn.Module, tensors: Iterable[FP8Tensor]):
        self.model = model
        self._places = {tensor: place for tensor in tensors if (place := _place(model, tensor)) is not None}
        self.found = list(self._places)
        self._groups = list(dict.fromkeys((owner, direction) for owner, direction, _ in self._places.values()))
        self._made: dict[tuple[torch.device, tuple[int, ...]], tuple[Tensor, Tensor]] = {}  # by device and sizes

    def _states(self) -> list[ScalingState]:
        return [states_of(owner)[direction] for owner, direction in self._groups]

    def scales(self) -> Tensor:
        """Return the scales of `found`, float32 on the device."""
        states = self._states()
        return torch.cat([state.scale for state in states])[self._columns(states)[0]]

    @torch.no_grad()
    def send(self, micro_batches: int) -> Sent:
        """Send everything that is there between two steps to the host. The next step does not change what was sent.

        `micro_batches`: of a step. Call it if `found` has any. Of a history of one row, Transformer Engine leaves
        nothing. The amax is then what the scale would just hold.
        """
        states = self._states()
        columns, largest = self._columns(states)
        scale = torch.cat([state.scale for state in states])[columns]
        history = torch.cat([state.amax_history for state in states], dim=1)[:, columns]
        of_te = isinstance(states[0], TEState)
        history, rows = states[0].newest_first(history), micro_batches if of_te else 1
        newest = history[:rows].amax(0)
        if len(history) == 1 and of_te:
            newest = largest / scale
        age = torch.div(history.argmax(0), rows, rounding_mode="floor")
        return Sent(torch.stack([newest, scale, age.float()]))

    def receive(self, sent: Sent) -> Mapping[FP8Tensor, Stored]:
        """Return what was sent."""
        return {
            tensor: Stored(amax, scale, int(age))
            for tensor, amax, scale, age in zip(self.found, *sent.read(), strict=True)
        }

    def _columns(self, states: Sequence[ScalingState]) -> tuple[Tensor, Tensor]:
        """Return the index of each of `found` among the tensors of all groups, and the largest number of its format.

        Both are on the device, and made once: to make them waits for the GPU.
        """
        device, sizes = states[0].scale.device, tuple(state.scale.numel() for state in states)
        if (device, sizes) not in self._made:
            starts = dict(zip(self._groups, accumulate(sizes, initial=0), strict=False))
            columns = [starts[owner, direction] + column for owner, direction, column in self._places.values()]
            largest = [LARGEST[tensor.dtype] for tensor in self.found]
            self._made[device, sizes] = torch.tensor(columns, device=device), torch.tensor(largest, device=device)
        return self._made[device, sizes]


def headroom(tensor: FP8Tensor, stored: Stored) -> float:
    """Return how many powers of two lie between a tensor's amax and the largest number of its format.

    It is negative if the amax was beyond that number; infinite if the amax is 0; NaN if it is not finite.
    """
    if stored.amax == 0:
        return math.inf
    reached = stored.amax * stored.scale
    return math.log2(LARGEST[tensor.dtype] / reached) if math.isfinite(reached) and reached > 0 else math.nan


def at_limit(scale: float) -> bool:
    """Return whether a scale is 0, infinite, NaN, or at the limits of the fused layers: no tensor of a run needs it."""
    return not 1 / LARGEST_SCALE < scale < LARGEST_SCALE


def _place(model: Any, tensor: FP8Tensor) -> tuple[nn.Module, str, int] | None:
    """Return whose state holds a tensor's scale, in which direction, and at which index; None if it is not stored."""
    holder, product = _holder(model, tensor.layer)
    direction = BACKWARD if tensor.kind == "gradient" else FORWARD
    if (places := getattr(holder, "places", None)) is not None:  # the fused and the emulated layers
        place = places.get(tensor.kind)
        return None if place is None else (model.scales, direction, place.number)
    if direction not in states_of(holder):
        return None
    column = 2 * product if tensor.kind == "gradient" else 3 * product + ("input", "weight").index(tensor.kind)
    return holder, direction, column


def _holder(model: Any, layer: str) -> tuple[Any, int]:
    """Return what knows the places of a layer's scales, and which of its products the layer is."""
    if layer == HEAD:
        return getattr(model.head, "linear", model.head), 0
    _, number, part = layer.split(".")
    block = model.blocks[int(number)]
    if hasattr(block, "linears"):  # the fused layers
        return getattr(block.linears, part), 0
    owner, name = product_place(block, part)
    product = getattr(owner, name, None)
    if hasattr(product, "places"):  # the emulated layers
        return product, 0
    if part in MLP and not hasattr(owner, part):  # one module of two products
        return owner, ("fc1", "fc2").index(part)
    return getattr(owner, part, owner), 0

"""FP8 for the layers of any `nn.Module`: which backend, which layers, and the region that a forward enters.

`nn.Linear` computes its product in FP8. With Transformer Engine, `nn.LayerNorm` and `nn.RMSNorm` become its own, too,
which write bfloat16. A converted layer holds the same `nn.Parameter` under the same name: tied weights stay tied,
optimizers and checkpoints see no difference. Everything else, subclasses of these too, runs under bfloat16 autocast.
A product's rows (sequences times tokens) must be a multiple of 16, as its two other dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpt2_fp8.compat.torch_private import keep_hooks
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import DelayedRecipe, FP8PrecisionConfig, StatelessRecipe
from gpt2_fp8.fp8 import recipes
from gpt2_fp8.fp8.base import Device
from gpt2_fp8.fp8.recipes import convert_linears, float8_config
from gpt2_fp8.fp8.support import why_no_torchao, why_not_recipe, why_not_te_fp8
from gpt2_fp8.layers import te
from gpt2_fp8.layers.emulated import EmulatedScales, Emulation, Product

MULTIPLE = 16  # FP8 GEMMs take products of this many rows and columns
SCALES = "fp8_scales"  # the emulated layers' state of delayed scaling, a submodule of the converted module
HOW = "fp8_conversion"  # the attribute of a converted module that tells how
Recipe = DelayedRecipe | StatelessRecipe
RECIPES = {  # of each backend
    "te": ("delayed", "current", "block", "mxfp8"),
    "torchao": ("current", "rowwise"),
    "emulated": ("delayed", "current", "block"),
}


@dataclass(frozen=True)
class Conversion:
    """How the layers of a module compute in FP8 on `device`."""

    backend: Literal["te", "torchao", "emulated"]
    precision: FP8PrecisionConfig
    recipe: Recipe
    device: Device

    def apply(self, module: nn.Module) -> list[str]:
        """Convert the layers of `module` in place and return the names of those whose products are FP8.

        A layer stays in bfloat16 if a pattern of `precision.keep_bf16` matches its name (`fnmatch`: "lm_head",
        "blocks.0.*"), if one of its dimensions is no multiple of 16, or if a hook computes its weight (`weight_norm`).
        """
        layers = dict(module.named_modules())
        fp8 = [name for name, layer in layers.items() if type(layer) is nn.Linear and self._takes(name, layer)]
        if self.backend == "torchao":
            config = float8_config(self.precision, self.recipe.name, emulate=self.device == "cpu")
            convert_linears(module, config, fp8)
        elif self.backend == "te":
            _replace(module, lambda name, layer: _of_transformer_engine(layer, name in fp8))
        else:
            self._emulate(module, fp8)
        for name, layer in layers.items():
            keep_hooks(layer, module.get_submodule(name))
        return fp8

    def _emulate(self, module: nn.Module, fp8: list[str]) -> None:
        how, delayed = recipes.emulation(self.precision, self.recipe)
        scales = EmulatedScales(delayed) if delayed else None
        _replace(module, lambda name, layer: _EmulatedLinear(layer, how, scales) if name in fp8 else None)
        if scales is not None:
            scales.allocate(next(module.parameters()).device)
            module.add_module(SCALES, scales)  # without parameters and buffers: the state dict stays as it was

    def _takes(self, name: str, layer: nn.Linear) -> bool:
        kept = any(fnmatchcase(name, pattern) for pattern in self.precision.keep_bf16)
        computed = not isinstance(layer.weight, nn.Parameter)
        return not (kept or computed) and layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0

    @contextmanager
    def region(self, module: nn.Module) -> Iterator[None]:
        """Enter the region of one forward of the converted `module`. The backward runs outside."""
        if isinstance(scales := getattr(module, SCALES, None), EmulatedScales):
            scales.begin(is_first_microbatch=None)
        with recipes.region(self._recipe) if self.backend == "te" else nullcontext():
            yield

    @cached_property
    def _recipe(self) -> Any:
        """Transformer Engine's own recipe object."""
        return recipes.build_recipe(self.precision, self.recipe)


def convert(module: nn.Module, how: Conversion) -> list[str]:
    """Convert `module` in place, unless that was done, and return the names of the layers in FP8.

    Raises UserError for a pattern of `keep_bf16` that no layer has, a module without a layer that can compute in FP8,
    and one that was converted in another way.
    """
    if (before := getattr(module, HOW, None)) is not None:
        if before[0] != how:
            raise UserError.of(f"the module was converted to FP8 before, with other settings: {before[0]}")
        return list(before[1])
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    kept = how.precision.keep_bf16
    if unmatched := [pattern for pattern in kept if not any(fnmatchcase(name, pattern) for name in names)]:
        raise UserError.of(f"keep_bf16 names no nn.Linear of the module: {', '.join(unmatched)}")
    fp8 = how.apply(module)
    if not fp8:
        raise UserError.of(f"no nn.Linear of the module can compute in FP8: dimensions are multiples of {MULTIPLE}")
    setattr(module, HOW, (how, fp8))
    return fp8


def resolve(precision: FP8PrecisionConfig, recipe: Recipe | None, device: Device) -> Conversion | str:
    """Return how `precision` is computed here, or why it cannot be. `recipe`: None: `current`, which keeps no state.

    Raises UserError for a backend that lacks the recipe, and with `precision.fallback=error` where FP8 cannot run.
    """
    if precision.name == "fp8_e5m2":
        raise UserError.of("precision=fp8_e5m2: no GPU multiplies E5M2 with E5M2", "fp8_hybrid or fp8_e4m3")
    recipe = recipe or StatelessRecipe(name="current")
    able = [name for name, known in RECIPES.items() if recipe.name in known]
    asked = precision.backend
    if asked != "auto" and asked not in able:
        raise UserError.of(
            f"backend={asked} has no layers for any module with recipe={recipe.name}", f"backend={' or '.join(able)}"
        )
    names = [asked] if asked != "auto" else [name for name in able if name != "emulated"]
    reasons = {name: _why_not(name, recipe.name, device) for name in names}
    for name, reason in reasons.items():
        if reason is None:
            return Conversion(name, precision, recipe, device)  # type: ignore[arg-type]  # of RECIPES
    reason = "; ".join(dict.fromkeys(reason for reason in reasons.values() if reason))
    if precision.fallback == "error":
        raise UserError.of(f"precision={precision.name} cannot run here: {reason}", "fallback=allow trains in bf16")
    return reason


def _why_not(backend: str, recipe: str, device: Device) -> str | None:
    if backend == "emulated":
        return None
    if device == "cpu":
        return "the CPU has no FP8 matrix units"
    return (why_not_te_fp8() if backend == "te" else why_no_torchao()) or why_not_recipe(recipe)


def _replace(module: nn.Module, made_of: Callable[[str, nn.Module], nn.Module | None]) -> None:
    """Put what `made_of` returns of each layer in its place; None leaves the layer. A shared layer stays shared."""
    names = {layer: name for name, layer in module.named_modules()}  # of a shared layer the first
    made = {layer: made_of(name, layer) for layer, name in names.items() if layer is not module}
    for parent in names:
        for name, child in list(parent.named_children()):
            if (replacement := made[child]) is not None:
                setattr(parent, name, replacement)


def _of_transformer_engine(layer: nn.Module, fp8: bool) -> nn.Module | None:
    """Build Transformer Engine's module with the parameters of `layer`; None for a layer that stays as it is."""
    if type(layer) is nn.Linear:
        made = te.linear(layer.in_features, layer.out_features, layer.bias is not None, True) if fp8 else None
    elif type(layer) is nn.LayerNorm or type(layer) is nn.RMSNorm:
        made = te.normalisation(layer)
    else:
        made = None
    if made is not None:
        _share(layer, made)
    return made


def _share(layer: nn.Module, made: nn.Module) -> None:
    for name, parameter in layer.named_parameters(recurse=False):
        setattr(made, name, parameter)
    made.train(layer.training)


class _EmulatedLinear(nn.Module):
    """y = x W^T + b, its operands cast to FP8 and back. x: [..., in_features]; y: [..., out_features].

    It is bfloat16 under autocast, and of the dtype of x elsewhere.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Module, how: Emulation, scales: EmulatedScales | None):
        super().__init__()
        self.product = Product(how, scales, rounded=True, dtype=torch.bfloat16)
        self.bias = None
        _share(layer, self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute y."""
        y = self.product(x, self.weight, self.bias)
        return y if torch.is_autocast_enabled(x.device.type) else y.to(x.dtype)

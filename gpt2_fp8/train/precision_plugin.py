"""The precision plugins for Lightning: FP8 for any LightningModule, and the one of a run, which `GPT2Module` enters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from gpt2_fp8.compat import lightning_private
from gpt2_fp8.config import parsing
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.schema import DelayedRecipe, FP8PrecisionConfig, RunConfig
from gpt2_fp8.fp8 import convert, state
from gpt2_fp8.fp8.base import Device
from gpt2_fp8.fp8.convert import Conversion, Recipe
from gpt2_fp8.fp8.resolve import Plan, resolve
from gpt2_fp8.fp8.scaling import FP8Scaling
from gpt2_fp8.runtime import devices

# what a configuration has besides, for the layers of a GPT2Module
_OF_RUNS = {"backward": "fp8", "reduce": "fp32", "evaluation": "fp8", "bf16_last_steps": 0, "fast_accumulation": False}


class FP8Precision(MixedPrecision):
    """FP8 matrix products for any LightningModule: `Trainer(plugins=[FP8Precision()])`.

    Weights stay float32. `nn.Linear` computes in FP8, forward and backward, and everything else under bfloat16
    autocast; `fp8.convert` says which layers, and how. Every step of the Trainer enters FP8: training with
    automatic or manual optimization, validation, test and predict. The scales of `recipe="delayed"` are saved in
    checkpoints as plain tensors, and are the same on all ranks after each optimizer step.

    Args:
        precision: "fp8_hybrid" (E4M3 forward, E5M2 gradients) or "fp8_e4m3".
        recipe: "current", "delayed", "block" or "mxfp8" (Transformer Engine), "rowwise" (torchao); or a
            `DelayedRecipe` with settings of its own. "auto": current, which keeps no state.
        backend: "te", "torchao", or "emulated" in plain torch on any device; "auto": the first of te and torchao that
            can.
        keep_bf16: patterns of the names of layers that stay in bfloat16, as `fnmatch` takes them.
        fallback: where FP8 cannot run: "allow" warns and trains in bfloat16, "error" raises.
        device: "cuda" or "cpu", the Trainer's; None: a GPU if there is one.

    Attributes:
        ran: the precision that runs: `precision`, or "bf16".
        converted: names of the layers that compute in FP8, once the Trainer has set the module up.

    Raises UserError for a value that is not known, a recipe that the backend lacks, and with `fallback="error"`.
    """

    def __init__(
        self,
        precision: Literal["fp8_hybrid", "fp8_e4m3"] = "fp8_hybrid",
        recipe: str | Recipe = "auto",
        *,
        backend: Literal["auto", "te", "torchao", "emulated"] = "auto",
        keep_bf16: Sequence[str] = (),
        fallback: Literal["allow", "error"] = "allow",
        device: Device | None = None,
    ):
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device not in ("cuda", "cpu"):
            raise UserError.of(f"device={device!r}: must be 'cuda' or 'cpu'")
        super().__init__("bf16-mixed", device)
        kept = [keep_bf16] if isinstance(keep_bf16, str) else [*keep_bf16]
        settings = {"name": precision, "backend": backend, "keep_bf16": kept, "fallback": fallback}
        config = _build(FP8PrecisionConfig, settings | _OF_RUNS, "precision")
        found = convert.resolve(config, _recipe(recipe), device)
        self.ran: str = precision
        self.converted: list[str] = []
        self._conversion: Conversion | None = None
        self._module: nn.Module | None = None  # the one that was converted
        self._scaling = FP8Scaling.of_nothing()
        if isinstance(found, Conversion):
            self._conversion = found
        else:
            self.ran = "bf16"
            rank_zero_warn(f"{precision} cannot run here, and bf16 trains instead: {found}")

    @staticmethod
    def from_config(config: RunConfig) -> RunPrecision:
        """Build the plugin of a run's `GPT2Module`. Raises UserError if this machine cannot, and may not fall back."""
        lightning_private.ignore_warnings(whole_run=False)  # before the Trainer is built, which has some
        return RunPrecision(resolve(config, devices.device(config)))

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the layers of `module`, in place, unless that was done.

        Raises UserError for a pattern of `keep_bf16` that no layer has, a module without a layer that can compute in
        FP8, one that was converted with other settings, and a Trainer on another device.
        """
        if isinstance(getattr(module, "config", None), RunConfig):
            raise UserError.of("GPT2Module computes as its configuration says", "FP8Precision.from_config(config)")
        self._check_device(module)
        if (how := self._conversion) is None or module is self._module:
            return module
        self.converted = convert.convert(module, how)
        self._module = module
        settings = f"{how.precision}, {how.recipe}, {how.backend}" if isinstance(how.recipe, DelayedRecipe) else None
        self._scaling = FP8Scaling(module, settings, 1, self.forward_context)
        rank_zero_info(f"{len(self.converted)} layers in {self.ran}, recipe {how.recipe.name}, by {how.backend}")
        return module

    def _check_device(self, module: nn.Module) -> None:
        try:
            found = module.trainer.strategy.root_device.type  # type: ignore[union-attr]
        except (AttributeError, RuntimeError):  # it is in no Trainer
            return
        if found != self.device:
            cause = f"the Trainer computes on {found!r}, and FP8Precision was made for {self.device!r}"
            raise UserError.of(cause, f"FP8Precision(device={'cpu' if found == 'cpu' else 'cuda'!r})")

    @contextmanager
    @override
    def forward_context(self) -> Iterator[None]:
        """Enter the precision of one forward. The backward runs outside of it."""
        how, module = self._conversion, self._module
        region = nullcontext() if how is None or module is None else how.region(module)
        with self.autocast_context_manager(), region:
            yield

    @contextmanager
    @override
    def train_step_context(self) -> Iterator[None]:
        """Enter the precision of a training step, with the scales of the checkpoint that it continues from."""
        self._take_scales()
        with self.forward_context():
            yield

    def _take_scales(self) -> None:
        """Give the layers a checkpoint's scales. Without any, each is 1 before the first step."""
        if self._scaling.ready:
            return
        how, module = self._conversion, self._module
        # A validation may come first. What its layers made in inference mode could not change in training.
        with torch.inference_mode(False):
            if not self._scaling.take() and how is not None and how.backend == "te" and module is not None:
                with self.forward_context():
                    state.allocate(module.get_submodule(name) for name in self.converted)
        self._scaling.ready = True

    @contextmanager
    @override
    def val_step_context(self) -> Iterator[None]:
        """Enter the precision of a validation step. It leaves the scales of training as they are."""
        self._take_scales()
        with self._scaling.unchanged(), self.forward_context():
            yield

    test_step_context = predict_step_context = val_step_context

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step, after the ranks have agreed about their amaxes."""

        def of_all_ranks() -> Any:
            result = closure()
            self._scaling.agree()
            return result

        return super().optimizer_step(optimizer, model, of_all_ranks, **kwargs)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the scales and amax histories of delayed scaling as plain tensors; {} under other recipes."""
        return self._scaling.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's scales for the next step."""
        self._scaling.ready = False
        self._scaling.load_state_dict(state_dict)


class RunPrecision(MixedPrecision):
    """The precision of a run, as its `plan`'s backend computes it: FP8, bf16 or float32, with float32 weights.

    An optimizer step of `GPT2Module` is one `training_step` with several forwards, backwards and the update. The
    module enters `forward_context` for each forward, and Lightning's contexts around the step do nothing.
    """

    def __init__(self, plan: Plan):
        super().__init__("bf16-mixed", plan.device)
        self.plan = plan

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return a `GPT2Module` unchanged. Raises UserError for any other: it would not enter the precision."""
        if not isinstance(getattr(module, "config", None), RunConfig):
            raise UserError.of(f"FP8Precision.from_config is for a GPT2Module, and this is a {type(module).__name__}",
                               "Trainer(plugins=[FP8Precision()]) for any other LightningModule")  # fmt: skip
        return module

    @override
    def forward_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Enter the precision of one forward."""
        return self.plan.backend.forward_context()

    @contextmanager
    @override
    def train_step_context(self) -> Iterator[None]:
        """Do nothing: the module enters `forward_context`."""
        yield

    val_step_context = test_step_context = predict_step_context = train_step_context


def _recipe(recipe: str | Recipe) -> Recipe | None:
    if recipe == "delayed":
        return DelayedRecipe(name="delayed", margin=0, amax_history_len=16, amax_compute_algo="max")
    if not isinstance(recipe, Recipe):
        return None if recipe == "auto" else _build(Recipe, {"name": recipe}, "recipe")
    return recipe


def _build(kind: Any, values: dict[str, Any], argument: str) -> Any:
    """Return the checked settings, whose `name` is the `argument`. Raises UserError with every problem."""
    made, found = parsing.build(kind, values, argument)
    if made is None:

        def shown(text: str) -> str:
            return text.replace(f"{argument}.name", argument).replace(f"{argument}.", "")

        raise UserError(Problem(shown(problem.cause), shown(problem.remedy)) for problem in found)
    return made

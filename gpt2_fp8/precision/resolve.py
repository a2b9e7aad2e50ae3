"""From the precision asked for to the one that runs here, with the reason where they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import FP8PrecisionConfig, RunConfig
from gpt2_fp8.layers import Backend
from gpt2_fp8.precision.support import why_not_fp8, why_not_recipe


@dataclass(frozen=True)
class Plan:
    """What will run. `reason` is None where that is what was asked for."""

    device: Literal["cuda", "cpu"]
    asked: str
    ran: str  # fp32, bf16, fp8_hybrid or fp8_e4m3
    reason: str | None
    backend: Backend
    compile: bool

    @property
    def fp8(self) -> bool:
        """Whether matrix products run in FP8."""
        return self.ran.startswith("fp8")


def resolve(config: RunConfig, device: Literal["cuda", "cpu"]) -> Plan:
    """Decide precision, layers and compilation for a device.

    Raises UserError when FP8 cannot run and `precision.fallback=error`, or when the GPU can do FP8 but not the recipe.
    """
    asked = config.precision.name
    ran: str = asked
    reason = None
    lesser = "bf16" if device == "cuda" else "fp32"
    if isinstance(config.precision, FP8PrecisionConfig):
        reason = "the CPU has no FP8 matrix units" if device == "cpu" else why_not_fp8()
        if device == "cpu" and config.trainer.accelerator != "cpu":
            reason = why_not_fp8() or reason
        if reason is None:
            _refuse_recipe(config)
        elif config.precision.fallback == "error":
            raise UserError.of(
                f"precision={asked} cannot run here: {reason}", f"precision.fallback=allow trains in {lesser}"
            )
        else:
            ran = lesser
    backend: Backend = "te" if ran.startswith("fp8") else "reference"
    wanted = device == "cuda" if config.compile == "auto" else config.compile
    return Plan(device, asked, ran, reason, backend, compile=wanted and backend == "reference")


def _refuse_recipe(config: RunConfig) -> None:
    name = config.recipe.name
    if reason := why_not_recipe(name):
        raise UserError.of(f"recipe={name} cannot run on this GPU: {reason}", "recipe=delayed, current or block")

"""From the precision asked for to the one that runs here, with the reason where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.fused_support import several
from gpt2_fp8.config.schema import AutoPrecisionConfig, FP8PrecisionConfig, RunConfig
from gpt2_fp8.config.shown import line
from gpt2_fp8.layers import Backend
from gpt2_fp8.precision.support import why_not_fp8, why_not_fused, why_not_recipe

SMALL = 32768  # tokens of a micro-batch up to which launching its kernels one by one costs more than it brings


@dataclass(frozen=True)
class Plan:
    """What will run. `reason` is None where that is what was asked for."""

    device: Literal["cuda", "cpu"]
    asked: str
    ran: str  # fp32, bf16, fp8_hybrid or fp8_e4m3
    reason: str | None
    backend: Backend
    compile: bool
    graphs: bool = False  # micro-batches are replayed as CUDA graphs
    fell_back: bool = False  # it began in FP8, and went on in bf16 after a rollback

    @property
    def fp8(self) -> bool:
        """Whether matrix products run in FP8."""
        return self.ran.startswith("fp8")


def resolve(config: RunConfig, device: Literal["cuda", "cpu"]) -> Plan:
    """Decide precision, layers and compilation for a device.

    Raises UserError when FP8 cannot run and `precision.fallback=error`, or when the GPU can do FP8 but not the recipe.
    """
    assert not isinstance(config.precision, AutoPrecisionConfig)  # settled before a plan is made
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
    backend = _backend(config) if ran.startswith("fp8") else "reference"
    compiled = _compiled(config, device) and backend == "reference"
    return Plan(device, asked, ran, reason, backend, compiled, graphs=_graphs(config, backend))


def fallen_back(plan: Plan, config: RunConfig, reason: str) -> Plan:
    """The plan of an FP8 run that goes on in bf16 for `reason`; any other as it is."""
    if not plan.fp8:
        return plan
    compiled = _compiled(config, plan.device)
    return replace(plan, ran="bf16", reason=reason, backend="reference", compile=compiled, graphs=False, fell_back=True)


def as_before(plan: Plan, config: RunConfig, saved: Mapping[str, Any]) -> Plan:
    """The plan of a run that continues from a checkpoint whose `precision` is `saved`: one that has fallen back to bf16
    stays there, unless another precision is asked for than then."""
    if not saved.get("fell_back") or saved.get("asked") != plan.asked:
        return plan
    reason = line(str(saved.get("reason")), 300)  # a stranger's words, perhaps, on their way to the log
    return replace(fallen_back(plan, config, reason), fell_back=True)  # also where FP8 cannot run


def _compiled(config: RunConfig, device: Literal["cuda", "cpu"]) -> bool:
    """Whether the plain-torch layers are compiled."""
    return device == "cuda" if config.compile == "auto" else config.compile


def _backend(config: RunConfig) -> Backend:
    """The layers of an FP8 run: the fused ones where they can be, unless others are asked for."""
    assert isinstance(config.precision, FP8PrecisionConfig)
    wanted, reason = config.precision.layers, why_not_fused(config)
    if wanted == "fused" and reason:
        raise UserError.of(f"precision.layers=fused cannot run here: {reason}", "precision.layers=auto")
    if config.precision.fast_accumulation and reason:
        cause = f"precision.fast_accumulation=true is the fused layers' own, and they cannot run here: {reason}"
        raise UserError.of(cause, "leave it out")
    return "fused" if wanted != "te" and reason is None else "te"


def _graphs(config: RunConfig, backend: Backend) -> bool:
    """Whether micro-batches run as CUDA graphs: by default where they are too small to keep the host ahead."""
    if (
        config.cuda_graphs is True and backend == "te"
    ):  # in bf16, since FP8 cannot run, there are none: that was allowed
        cause = f"cuda_graphs=true records the fused FP8 layers alone, and this run has the layers {backend!r}"
        raise UserError.of(cause, "cuda_graphs=auto, or precision=fp8_hybrid recipe=delayed on a Hopper GPU")
    small = config.micro_batch * config.model.n_positions <= SMALL
    wanted = small if config.cuda_graphs == "auto" else config.cuda_graphs
    return wanted and backend == "fused" and not several(config)


def _refuse_recipe(config: RunConfig) -> None:
    name = config.recipe.name
    if reason := why_not_recipe(name):
        raise UserError.of(f"recipe={name} cannot run on this GPU: {reason}", "recipe=delayed, current or block")

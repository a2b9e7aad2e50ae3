"""From the precision and backend that were asked for to what runs here, and the reason for a difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpt2_fp8.config import backend_support
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import FP8PrecisionConfig, RunConfig
from gpt2_fp8.config.shown import line
from gpt2_fp8.fp8.backends import Emulated, Fused, Reference, Torchao, TransformerEngine
from gpt2_fp8.fp8.base import Backend, Device, Ran, compiles_plain
from gpt2_fp8.fp8.support import why_no_fp8_units, why_no_hopper, why_no_torchao, why_not_recipe, why_not_te_fp8
from gpt2_fp8.kernels import nvrtc

BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend for backend in (Fused, TransformerEngine, Torchao, Reference, Emulated)
}
# the fastest first: `precision.backend=auto` takes the first that can compute the run
IN_FP8: tuple[type[Backend], ...] = (Fused, TransformerEngine, Torchao)


@dataclass(frozen=True)
class Plan:
    """What will run. `reason` is None if that is what was asked for."""

    device: Device
    asked: str
    ran: Ran
    reason: str | None
    backend: Backend
    fell_back: bool = False  # whether a run that began in FP8 went on in bf16 after a rollback

    @property
    def fp8(self) -> bool:
        """Whether GEMMs run in FP8."""
        return self.ran.startswith("fp8")

    @property
    def evaluates_in_bf16(self) -> bool:
        """Whether validation, samples and logits of an FP8 run compute in bf16 (`precision.evaluation`)."""
        precision = self.backend.config.precision
        return self.fp8 and isinstance(precision, FP8PrecisionConfig) and precision.evaluation == "bf16"

    @property
    def recorded(self) -> bool:
        """Whether `torch.compile` records CUDA graphs of the loss."""
        return isinstance(self.backend, Reference) and self.backend.recorded

    @property
    def compiles_twin(self) -> bool:
        """Whether many bf16 steps of an FP8 run are compiled.

        Transformer Engine's layers compute them themselves, and under FSDP a twin cannot be compiled as a whole.
        """
        config = self.backend.config
        apart = isinstance(self.backend, TransformerEngine) or config.trainer.strategy == "fsdp"
        return not apart and compiles_plain(config, self.device)

    @property
    def label(self) -> str:
        """The word for these layers in a table of measurements."""
        if not isinstance(self.backend, Reference):
            return self.backend.name
        return ("recorded" if self.recorded else "compiled") if self.backend.compiled else "plain"

    def evaluation_kernels(self, vocab_size: int) -> dict[str, str]:
        """Describe, as `Backend.kernels` does, what computes a validation."""
        if not self.evaluates_in_bf16:
            return self.backend.kernels(vocab_size)
        layers = "Transformer Engine's" if isinstance(self.backend, TransformerEngine) else "plain torch"
        return {"layers": f"{layers}, in bf16"}

    def slower(self) -> str | None:
        """Return what is broken on this machine, so that slower kernels do its work."""
        if isinstance(self.backend, Fused):
            return self.backend.slower()
        config = self.backend.config
        if self.device == "cpu" or not self.fp8 or config.precision.backend != "auto":
            return None
        return None if backend_support.why_not_fused(config) or why_no_hopper() else nvrtc.why_missing()

    @property
    def recipe(self) -> str | None:
        """The name of the recipe that gives FP8 tensors their scales; None if nothing is scaled."""
        return self.backend.recipe.name if self.fp8 and self.backend.recipe else None

    def computes_as(self, other: Plan) -> bool:
        """Tell whether a model of this plan can run under another: the same layers, precisions and device."""
        mine, theirs = (
            (type(plan.backend), plan.ran, plan.recipe, plan.device, plan.evaluates_in_bf16) for plan in (self, other)
        )
        return mine == theirs


def resolve(config: RunConfig, device: Device) -> Plan:
    """Decide precision and backend for a device.

    Raises UserError if FP8 cannot run and `precision.fallback=error`, if the GPU can do FP8 but not the recipe, if the
    backend cannot compute the run or its layers cannot take `attention`, and without a GPU for `compile_mode`.
    """
    plan = _resolve(config, device)
    check_attention(plan.backend)
    if config.compile_mode != "default" and not plan.recorded:
        cause = f"compile_mode={config.compile_mode} records CUDA graphs, and this run is on the CPU"
        raise UserError.of(cause, "compile_mode=default")
    if plan.ran == "fp32" and config.trainer.gather == "bfloat16":
        cause = "trainer.gather=bfloat16, and this run computes in fp32"
        raise UserError.of(f"{cause}: {plan.reason}" if plan.reason else cause, "trainer.gather=float32")
    return plan


def _resolve(config: RunConfig, device: Device) -> Plan:
    precision = config.precision
    assert precision.name != "fp8_e5m2"  # refused by the check of the settings
    if not isinstance(precision, FP8PrecisionConfig):
        backend = Reference if precision.backend == "auto" else _get_backend(config, precision.backend)
    elif precision.backend == Emulated.name:  # it needs no FP8 units, so there is nothing to fall back from
        backend = _get_backend(config, precision.backend)
    elif (reason := _why_not_fp8(config, device)) is None:
        backend = _in_fp8(config)
    else:
        lesser: Ran = "bf16" if device == "cuda" else "fp32"
        if precision.fallback == "error":
            cause = f"precision={precision.name} cannot run here: {reason}"
            raise UserError.of(cause, f"precision.fallback=allow trains in {lesser}")
        return Plan(device, precision.name, lesser, reason, Reference(config, lesser, device))
    return Plan(device, precision.name, precision.name, None, backend(config, precision.name, device))


def plain_plan(config: RunConfig, device: Device) -> Plan:
    """Return the plan of plain torch in float32, which can hold any run's weights on any machine."""
    reason = "no Trainer has said yet what computes"
    return Plan(device, config.precision.name, "fp32", reason, Reference(_freely(config), "fp32", device))


def fallen_back(plan: Plan, config: RunConfig, reason: str) -> Plan:
    """Return the plan of an FP8 run that goes on in bf16 for `reason`. Any other plan is returned unchanged."""
    if not plan.fp8:
        return plan
    backend = Reference(config, "bf16", plan.device)
    if backend.why_not_attention(config.attention):
        backend = Reference(_freely(config), "bf16", plan.device)
    return replace(plan, ran="bf16", reason=reason, backend=backend, fell_back=True)


def _freely(config: RunConfig) -> RunConfig:
    """Leave the kernel of attention to torch, for layers that a run did not ask for."""
    return replace(config, attention="auto")


def as_before(plan: Plan, config: RunConfig, saved: Mapping[str, Any]) -> Plan:
    """Return the plan of a run that continues from a checkpoint whose `precision` is `saved`.

    A run that fell back to bf16 stays in bf16, unless another precision is asked for now than then.
    """
    if not saved.get("fell_back") or saved.get("asked") != plan.asked:
        return plan
    # The checkpoint may be a stranger's: its text is escaped and cut before it reaches the log.
    reason = line(str(saved.get("reason")), 300)
    return replace(fallen_back(plan, config, reason), fell_back=True)  # also if FP8 cannot run here


def _why_not_fp8(config: RunConfig, device: Device) -> str | None:
    if device == "cuda":
        return _why_not_on_gpu(config)
    on_cpu = "the CPU has no FP8 matrix units"
    return on_cpu if config.trainer.accelerator == "cpu" else _why_not_on_gpu(config) or on_cpu


def _why_not_on_gpu(config: RunConfig) -> str | None:
    """Return why the GPU cannot do FP8 with the layers that are asked for, or with any that the settings allow."""
    assert isinstance(config.precision, FP8PrecisionConfig)
    asked = config.precision.backend
    if asked == Torchao.name:
        return why_no_torchao()
    if (reason := why_not_te_fp8()) is None or asked != "auto" or why_no_fp8_units():
        return reason
    unable = backend_support.why_not_torchao(config)
    without = f"torchao: {unable}" if unable else why_no_torchao()
    return f"{reason}; {without}" if without else None


def _in_fp8(config: RunConfig) -> type[Backend]:
    """Return the backend of an FP8 run: the fastest that can compute it, unless one is asked for."""
    assert isinstance(config.precision, FP8PrecisionConfig)
    if reason := why_not_recipe(config.recipe.name):
        cause = f"recipe={config.recipe.name} cannot run on this GPU: {reason}"
        raise UserError.of(cause, "recipe=auto")
    asked = config.precision.backend
    if config.precision.fast_accumulation and (reason := Fused.why_not(config)):
        cause = f"precision.fast_accumulation=true is the fused layers' own, and they cannot run here: {reason}"
        raise UserError.of(cause, "leave precision.fast_accumulation out")
    found = _fastest(config) if asked == "auto" else _get_backend(config, asked)
    if config.cuda_graphs is True and found is not Fused:
        cause = f"cuda_graphs=true records only the fused FP8 layers, and this run has the layers {found.name!r}"
        raise UserError.of(cause, "cuda_graphs=auto, or precision=fp8_hybrid recipe=delayed on a Hopper GPU")
    return found


def _fastest(config: RunConfig) -> type[Backend]:
    """Return the first of `IN_FP8` that can compute the run. Without Transformer Engine that is torchao.

    Raises UserError if there is none: the settings leave torchao alone, and it is not here.
    """
    able = IN_FP8 if why_not_te_fp8() is None else (Torchao,)
    if found := next((backend for backend in able if backend.why_not(config) is None), None):
        return found
    cause = f"only torchao's layers can compute this run in FP8, and they cannot here: {Torchao.why_not(config)}"
    raise UserError.of(cause, 'pip install -e ".[torchao]"')


def _get_backend(config: RunConfig, name: str) -> type[Backend]:
    """Return the backend with the given name. Raises UserError if it cannot compute the run here."""
    backend = BACKENDS[name]
    if reason := backend.why_not(config):
        raise UserError.of(f"precision.backend={name} cannot run here: {reason}", "precision.backend=auto")
    return backend


def check_attention(backend: Backend) -> None:
    """Raise UserError if the backend's layers cannot take `attention`. It allocates at most one sequence's heads."""
    kernel = backend.config.attention
    if reason := backend.why_not_attention(kernel):
        raise UserError.of(f"attention={kernel} cannot run here: {reason}", "attention=auto")

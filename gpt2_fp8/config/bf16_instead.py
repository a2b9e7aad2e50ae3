"""Whether a run in FP8 could be one in bf16, and what is typed for it."""

from __future__ import annotations

from dataclasses import replace

from gpt2_fp8.config import attention_support, backend_support
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig, PlainPrecisionConfig
from gpt2_fp8.config.schema import RunConfig

_ONLY_FP8 = ("fused", "torchao", "emulated")  # layers that are for FP8 alone are not kept


def words(config: RunConfig) -> str | None:
    """Return what is typed for bf16 in place of FP8; None if the run would be refused for another reason then.

    The keys that only FP8 has may differ from their defaults: they would be refused beside bf16. Kernels that only the
    FP8 layers have may be asked for.
    """
    precision = config.precision
    if not isinstance(precision, FP8PrecisionConfig):
        return None
    plain = FP8PrecisionConfig(  # what `conf/_precision_fp8.yaml` gives
        name=precision.name, backend=precision.backend, keep_bf16=[], evaluation="bf16", fast_accumulation=False,
        fallback="allow",
    )  # fmt: skip
    backend = "auto" if precision.backend in _ONLY_FP8 else precision.backend
    changed = replace(config, precision=PlainPrecisionConfig(name="bf16", backend=backend))
    able = backend_support.why_not_asked(changed) is None and _refused(changed) <= _refused(config)
    if precision != plain or not able:
        return None
    return "precision=bf16" + (" precision.backend=auto" if backend != precision.backend else "")


def _refused(config: RunConfig) -> set[tuple[str, ...]]:
    return {found.keys for found in (*backend_support.options(config), *attention_support.check(config))}

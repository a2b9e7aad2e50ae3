"""What the fused FP8 layers and their CUDA graphs can be asked for. What only the GPU can tell is in `precision`."""

from __future__ import annotations

from collections.abc import Iterator

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.schema import AutoPrecisionConfig, FP8PrecisionConfig, RunConfig


def why_not(config: RunConfig) -> str | None:
    """The reason a run in FP8 cannot use the fused layers, whatever the GPU; None if it can."""
    if config.recipe.name != "delayed":
        return f"they do delayed scaling alone, not recipe={config.recipe.name}"
    if config.model.dropout:
        return f"they have no dropout, and model.dropout={config.model.dropout:g}"
    return None


def several(config: RunConfig) -> bool:
    """Whether a run is set up for more than one process."""
    return config.trainer.devices != 1 or config.trainer.num_nodes != 1 or config.trainer.strategy == "ddp"


def check(config: RunConfig) -> Iterator[Finding]:
    """Requests for the fused layers or for graphs that no machine can fulfil."""
    precision = config.precision
    if isinstance(precision, FP8PrecisionConfig) and precision.layers == "fused" and (reason := why_not(config)):
        problem = Problem(f"precision.layers=fused cannot run: {reason}", "precision.layers=auto")
        yield Finding(("precision.layers", "recipe", "model.dropout"), problem)
    fast = isinstance(precision, FP8PrecisionConfig) and precision.fast_accumulation
    if fast and (reason := _only_fused(config, "that choice")):
        problem = Problem(f"precision.fast_accumulation=true: {reason}", "leave it out")
        yield Finding(("precision.fast_accumulation",), problem)
    if config.cuda_graphs is True and (reason := _why_no_graphs(config)):
        problem = Problem(f"cuda_graphs=true: {reason}", "cuda_graphs=auto takes them where they help")
        yield Finding(("cuda_graphs",), problem)


def _only_fused(config: RunConfig, what: str) -> str | None:
    """Why a run in FP8 cannot have `what` of the fused layers; None if it can."""
    assert isinstance(config.precision, FP8PrecisionConfig)
    if config.precision.layers == "te":
        return f"only the fused FP8 layers have {what}, and this is precision.layers=te"
    if reason := why_not(config):
        return f"only the fused FP8 layers have {what}; {reason}"
    return None


def _why_no_graphs(config: RunConfig) -> str | None:
    if several(config):
        return "graphs are for one GPU, and this is a run on several"
    if isinstance(config.precision, AutoPrecisionConfig):
        return "only the fused FP8 layers have graphs, and precision=auto may choose others"
    if not isinstance(config.precision, FP8PrecisionConfig):
        return f"only the fused FP8 layers have graphs, and this is precision={config.precision.name}"
    return _only_fused(config, "graphs")

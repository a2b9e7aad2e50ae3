"""What competes under `precision=auto`: bf16, and FP8 with each recipe, over a few steps of the run's own model.

The steps take the run's micro-batch and optimizer, with a text and a learning rate that are the same for every run. So
their figures are valid for every run with the same shapes and optimizer, and are kept (`auto_cache`).
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Literal, cast

import torch

from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.data_schema import StdlibData
from gpt2_fp8.config.model_checks import recipe_multiple
from gpt2_fp8.config.precision_schema import (
    AutoPrecisionConfig,
    AutoRecipe,
    FP8PrecisionConfig,
    PlainPrecisionConfig,
    StatelessRecipe,
)
from gpt2_fp8.config.schema import MuonOptimizer, OptimizerConfig, RunConfig
from gpt2_fp8.kernels.nvrtc import missing
from gpt2_fp8.measure import auto_cache
from gpt2_fp8.measure.case import Case, Result, measure
from gpt2_fp8.measure.versions import versions
from gpt2_fp8.precision.choose import Figures
from gpt2_fp8.precision.support import why_not_recipe
from gpt2_fp8.runtime.source_digest import source_digest

log = logging.getLogger(__name__)

FORMAT = "fp8_hybrid"
RECIPES = ("mxfp8", "block", "current", "delayed")  # the most precise first: it wins if speeds are equal
WARMUP, STEPS = 5, 10
LR = 3e-4  # the same for every run: it changes how soon losses differ, and sweeps vary it
_RATE: dict[str, Any] = {
    "lr": LR, "warmup_steps": WARMUP, "schedule": "cosine", "min_lr_ratio": 0.1, "decay_steps": None,
}  # fmt: skip
OUT_OF_MEMORY = "out of memory"  # may be caused by another process on the GPU, so it is never cached
CANDIDATE_SECONDS = 300.0  # for one candidate, with compilation
# The text of the measurement: available on every machine, read in this process, in one order, without validation.
_DATA = StdlibData(
    name="stdlib", kind="stdlib", tokenizer="bytes", num_workers=0, seed=0, val_sequences=0, cache_dir=None
)
_NO_PART = ("precision", "recipe", "callbacks", "logger", "run_name", "ckpt_path", "init_from", "tags", "notes")


def concrete(
    config: RunConfig, precision: str, recipe: str | None, fallback: Literal["allow", "error"] = "allow"
) -> RunConfig:
    """Replace `precision=auto` by the given precision and recipe.

    A recipe that the user named stays. `fallback`: of the FP8 precisions.
    """
    auto = cast(AutoPrecisionConfig, config.precision)
    chosen: PlainPrecisionConfig | FP8PrecisionConfig
    if precision in ("fp32", "bf16"):
        chosen = PlainPrecisionConfig(name=cast(Literal["fp32", "bf16"], precision), backend="auto")
    else:
        name = cast(Literal["fp8_hybrid"], precision)
        chosen = FP8PrecisionConfig(
            name=name, keep_bf16=auto.keep_bf16, backend="auto", evaluation=auto.evaluation,
            bf16_last_steps=auto.bf16_last_steps, fast_accumulation=False, fallback=fallback,
        )  # fmt: skip
    scaling = config.recipe
    if isinstance(scaling, AutoRecipe):
        stateless = recipe not in (None, "delayed")
        scaling = StatelessRecipe(name=cast(Literal["current"], recipe)) if stateless else scaling.delayed
    return replace(config, precision=chosen, recipe=scaling)


def candidates(config: RunConfig, world_size: int) -> list[RunConfig]:
    """List what competes: bf16, then FP8 from the most precise recipe on, on a GPU that can do FP8.

    A step has at most two micro-batches. Settings without influence on speed or numbers are set to the same value for
    every run, and the others form the key of an answer. A key that is added to the schema belongs to the others.
    """
    micro, model, steps = config.micro_batch, config.model, WARMUP + STEPS
    base = replace(
        config,
        # losses are of training, in the precision that is measured
        precision=replace(cast(AutoPrecisionConfig, config.precision), evaluation="fp8", bf16_last_steps=0),
        seed=0,
        global_batch_size=micro * min(config.global_batch_size // (micro * world_size), 2),
        model=replace(model, name="auto", vocab_size=vocabulary(config)),
        cuda_graphs=config.cuda_graphs,
        data=_DATA,
        optim=replace(config.optim, **_RATE),
        optimizer=_at_one_rate(config.optimizer),
        trainer=replace(
            config.trainer, accelerator="gpu", devices=1, num_nodes=1, strategy="auto", max_steps=steps,
            max_tokens=None, max_epochs=None, max_time=None,
            val_check_interval=steps, log_every_n_steps=1, fast_dev_run=False, overfit_batches=0, profiler=None,
        ),
    )  # fmt: skip
    names = RECIPES if isinstance(config.recipe, AutoRecipe) else (config.recipe.name,)
    able = [name for name in names if why_not_recipe(name) is None and not unfit(config, name)]
    return [concrete(base, "bf16", None), *(concrete(base, FORMAT, name, fallback="error") for name in able)]


def unfit(config: RunConfig, recipe: str) -> bool:
    """Return whether a recipe cannot multiply a model's widths, or the tokens of one sequence.

    A sample is one sequence, and so are the last sequences of a validation.
    """
    multiple = recipe_multiple(recipe)
    return any(n % multiple for n in (*block_spec(config.model).widths, config.model.n_positions))


def key(cases: Sequence[RunConfig]) -> dict[str, Any]:
    """Describe in plain JSON values what the figures are valid for: machine, GPU, versions, shapes, candidates."""
    run = {name: value for name, value in asdict(cases[0]).items() if name not in _NO_PART}
    competing = [{name: asdict(case)[name] for name in ("precision", "recipe")} for case in cases]
    about = {name: version for name, version in versions().items() if name not in ("python", "lightning")}
    about |= {"kernels": missing() or "all", "code": source_digest() or "unknown"}
    # several machines may share a home folder
    device = {"host": platform.node(), "device": torch.cuda.get_device_name()}
    return {**device, "versions": about, "run": run, "candidates": competing}


def _at_one_rate(optimizer: OptimizerConfig) -> OptimizerConfig:
    return replace(optimizer, matrix_lr=None) if isinstance(optimizer, MuonOptimizer) else optimizer


def unknown(cases: Sequence[RunConfig], known: Sequence[Figures]) -> list[RunConfig]:
    """Return the candidates that have no figures among `known`."""
    have = {(figures.precision, figures.recipe) for figures in known}
    return [case for case in cases if _name(case) not in have]


def figures(cases: Sequence[RunConfig], under: dict[str, Any], known: Sequence[Figures]) -> auto_cache.Measured:
    """Measure the candidates that are not `known`, and return the day and the figures of all.

    Figures are stored unless one may be due to a temporary fault. Such a fault is a candidate that failed or took too
    long, or bf16 without figures. A candidate that ran out of memory is measured again next time, since another process
    may have held the GPU's memory.
    """
    new, lasting = unknown(cases, known), True
    log.info("precision  auto: %d candidates train for %d steps each; a few minutes, once", len(new), WARMUP + STEPS)
    found = {(figures.precision, figures.recipe): figures for figures in known}
    for case in new:
        result = measure(Case(config=case, steps=STEPS, warmup=WARMUP), CANDIDATE_SECONDS)
        its = found[_name(case)] = _figures(case, result)
        log.info("           %s: %s", its.name, its.problem or f"{result.tokens_per_second:,.0f} tokens/s")
        lasting = lasting and result.status in ("ok", "refused", OUT_OF_MEMORY)
    today, every = datetime.now(UTC).date().isoformat(), [found[_name(case)] for case in cases]
    kept = [figures for figures in every if figures.problem != OUT_OF_MEMORY]
    if kept and lasting and every[0].problem in (None, OUT_OF_MEMORY):
        auto_cache.store(under, today, kept)
    return today, every


def _figures(case: RunConfig, result: Result) -> Figures:
    (precision, recipe), problem = _name(case), None
    if result.status != "ok":
        problem = result.status if result.status == OUT_OF_MEMORY else f"{result.status}: {result.message}"
    elif result.ran != case.precision.name:
        problem = f"it ran in {result.ran}: {result.reason}"
    elif result.tokens_per_second is None:
        problem = "it gave no figures"
    return Figures(
        precision=precision,
        recipe=recipe,
        problem=problem,
        layers=result.backend,
        tokens_per_second=result.tokens_per_second,
        fastest=result.fastest,
        peak_memory_gb=result.peak_memory_gb,
        losses=result.losses,
        grad_norms=result.grad_norms,
    )


def _name(case: RunConfig) -> tuple[str, str | None]:
    """Return a candidate's precision and its scaling recipe; None if nothing is scaled."""
    scaled = isinstance(case.precision, FP8PrecisionConfig)
    return case.precision.name, case.recipe.name if scaled else None

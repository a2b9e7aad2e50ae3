"""What `accelerate launch` was told for its own Accelerator, which this program has none of. Standard library only.

Its options, and the file that `accelerate config` has written, reach the processes as variables. Source:
accelerate/utils/launch.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpt2_fp8.config.errors import Problem

_SIGN = "ACCELERATE_MIXED_PRECISION"  # which `accelerate launch` always sets
_DIVIDING = {
    "ACCELERATE_USE_FSDP": "--use_fsdp",
    "ACCELERATE_USE_DEEPSPEED": "--use_deepspeed",
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "--use_parallelism_config",
}


def refused(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Find options that would divide a model among GPUs: here each process has the whole of it."""
    for name, option in _DIVIDING.items():
        if _SIGN in environment and environment.get(name, "").lower() == "true":
            yield Problem(
                f"accelerate launch {option}: here each process trains the whole model, and nothing of it is divided",
                f"accelerate launch --multi_gpu without {option}; or no file of `accelerate config` that says it",
            )


def unheard(environment: Mapping[str, str], precision: str, device: str) -> Iterator[str]:
    """Yield what to say of options that a run on `device` with `precision` does not follow."""
    asked = environment.get(_SIGN, "no")
    meant = "fp8_hybrid" if asked == "fp8" else "bf16"
    if asked != "no" and precision.partition("_")[0] != meant.partition("_")[0]:
        yield (
            f"accelerate launch --mixed_precision={asked} changes nothing here: precision={precision} does, and "
            f"precision={meant} would"
        )
    if _SIGN in environment and environment.get("ACCELERATE_USE_CPU") == "True" and device != "cpu":
        yield "accelerate launch --cpu changes nothing here: trainer.accelerator=cpu would"

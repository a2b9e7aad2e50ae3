"""Where TensorBoard shows each metric: its run (`train`, `val`), its tag, and the page of custom charts.

TensorBoard sorts tags by name, makes a group of what comes before the first slash, and opens the first two groups. So
the names are chosen to begin with the loss: loss, optim, optim_steps, precision_fp8, precision_fp8_layers, speed,
system, tensors_*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

RUNS = ("train", "val")
HYPER_PARAMETERS = (("loss", "val"), ("loss", "train"), ("speed/tokens_per_second", "train"))  # tag, run: final values

_TAGS = {
    "train_loss": ("train", "loss"),
    "val_loss": ("val", "loss"),
    "penalty": ("train", "loss/penalty"),
    **{name: ("train", f"optim/{name}") for name in ("lr", "grad_norm", "clip_ratio")},
    **{name: ("train", f"optim_steps/{name}") for name in ("skipped_steps", "bf16_reruns", "tokens")},
    **{name: ("train", f"speed/{name}") for name in ("tokens_per_second", "step_time", "data_wait", "mfu_bf16")},
    **{name: ("train", f"system/{name}") for name in ("memory_gb", "gpu_power_watts", "gpu_utilization")},
}
_PREFIXES = {
    "fp8/": ("train", "precision_fp8/"),
    "val_loss/": ("val", "loss/"),  # of a source of a mixture
    "tokens/": ("train", "optim_steps/tokens_of_"),
    "epochs/": ("train", "optim_steps/epochs_of_"),
}
_LARGEST_EXPONENT = 50.0  # of a perplexity that is shown: e^50


def place(name: str) -> tuple[str, str]:
    """Return the run and the tag of a metric. One that is not this project's keeps its name."""
    if name in _TAGS:
        return _TAGS[name]
    for prefix, (run, tag) in _PREFIXES.items():
        if name.startswith(prefix):
            return run, tag + name.removeprefix(prefix)
    return ("val" if name.startswith("val_") else "train"), name


def of_layer(figure: str, kind: str, layer: str) -> str:
    """Return the tag of a figure of one FP8 tensor: its scale, say."""
    return f"precision_fp8_layers/{figure}_{kind}/{layer}"


def placed(metrics: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
    """Yield run, tag and value of each metric, and the perplexity of each loss: e to the loss in nats."""
    for name, value in metrics.items():
        run, tag = place(name)
        yield run, tag, value
        if tag == "loss" and name in _TAGS and float(value) < _LARGEST_EXPONENT:
            yield run, "loss/perplexity", math.exp(float(value))


def custom_charts() -> dict[str, dict[str, list[object]]]:
    """Return the layout of TensorBoard's page CUSTOM SCALARS: groups of charts of several tags each."""

    def lines(*tags: str) -> list[object]:
        return ["Multiline", list(tags)]

    fp8 = {
        f"{figure} of inputs, weights and gradients": lines(f"precision_fp8/{figure}_.*")
        for figure in ("amax", "scale", "headroom", "saturated", "flushed")
    }
    for kind in ("input", "weight", "gradient"):
        fp8[f"scale of each layer's {kind}"] = lines(f"precision_fp8_layers/scale_{kind}/.*")
    return {
        "loss": {"training and validation": lines("^loss$"), "perplexity": lines("loss/perplexity")},
        "optimizer": {
            "learning rate": lines("optim/lr"),
            "gradient norm": lines("optim/grad_norm"),
            "gradient norm of each matrix": lines("tensors_norm/.*"),
            "skipped steps and steps again in bf16": lines("optim_steps/skipped_steps", "optim_steps/bf16_reruns"),
        },
        "FP8": fp8,
        "speed": {
            "tokens per second": lines("speed/tokens_per_second"),
            "part of the time spent waiting for data": lines("speed/data_wait"),
            "GPU: power in watts": lines("system/gpu_power_watts"),
        },
    }

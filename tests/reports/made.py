"""Folders as runs leave them, with losses that are known exactly."""

import csv
import json
from pathlib import Path

from gpt2_fp8.train.run_end import Summary

TOKENS = 100  # a step


def settings(precision="bf16", seed=1, **changed):
    """A configuration as summary.json holds it, of the keys that a comparison looks at; `a__b=1` changes `a.b`."""
    found = {
        "seed": seed, "ckpt_path": None, "model": {"name": "tiny"},
        "precision": {"name": precision, "backend": "auto"}, "recipe": {"name": "auto"},
        "data": {"name": "stdlib", "seed": seed}, "optim": {"lr": 1e-3},
        "trainer": {"log_every_n_steps": 1, "max_steps": 100}, "logger": {"tensorboard": True},
    }  # fmt: skip
    for key, value in changed.items():
        group, _, name = key.rpartition("__")
        (found[group] if group else found)[name] = value
    return found


def rows(loss, steps=100, every=1, seconds=0.5, validations=None, start=0, **columns):
    """Rows of a log: the training loss of a step is `loss(step)`, so an interval's is the mean of its steps."""
    found = []
    for step in range(start + every, steps + 1, every):
        took = {} if step == start + every else {"step_time": seconds, "tokens_per_second": TOKENS / seconds}
        mean = sum(loss(one) for one in range(step - every + 1, step + 1)) / every
        found.append({"step": step, "tokens": step * TOKENS, "train_loss": mean, "grad_norm": 1.0, **took, **columns})
    return found + [{"step": step, "val_loss": value} for step, value in (validations or {}).items()]


def run(folder, logged, config=None, *, ran=None, reason=None, **summary):
    """Write a run's folder: summary.json and metrics.csv. Returns the folder."""
    folder, config = Path(folder), config or settings()
    asked = config["precision"]["name"]
    found = Summary(
        precision={"asked": asked, "ran": ran or asked, "reason": reason}, config=config,
        checkpoint={"last": "checkpoints/x"}, device="NVIDIA H200", kernels={"layers": "fused"},
        steps=max((row["step"] for row in logged), default=0),
    )  # fmt: skip
    found.finish()
    for key, value in ({"peak_memory_gb": 20.0} | summary).items():
        setattr(found, key, value)
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(vars(found), default=vars))
    names = dict.fromkeys(["step", *(name for row in logged for name in row)])
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(logged)
    return folder

"""Small runs of the real thing, for tests: composed by Hydra's files, trained by the real Trainer, on a CPU."""

import csv
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.checkpoint.files import read
from tests import forkserver

SMALL = [
    "trainer=cpu", "model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.n_positions=32",
    "global_batch_size=8", "micro_batch_size=4", "trainer.max_steps=12", "trainer.val_check_interval=5",
    "optim.warmup_steps=2", "data.val_sequences=8", "trainer.log_every_n_steps=1",
    "callbacks.checkpoint_every_n_steps=4", "callbacks.sample_tokens=0", "callbacks.progress_bar=false",
]  # fmt: skip


def train(folder, *overrides, base=SMALL):
    """Run in this process; returns the validation loss."""
    from gpt2_fp8.train.launch import train as run

    (config,) = compose.preflight([*base, f"run_name={Path(folder).name}", *overrides])
    Path(folder).mkdir(parents=True, exist_ok=True)
    return run(config, Path(folder))


def training_step(*overrides):
    """A step of a tiny run, ready to be called with ids of 256 bytes."""
    from gpt2_fp8.engine.training_step import TrainingStep
    from gpt2_fp8.fp8.resolve import resolve

    (config,) = compose.preflight([*SMALL, *overrides, "data.tokenizer=bytes"])
    step = TrainingStep(config, resolve(config, "cpu"), 256)
    step.initialise()
    step.prepare_optimizer()
    return step


# In FP8 on any device, and with random numbers in the forward: what a step draws shows in its loss.
EMULATED_FP8 = ["precision=fp8_hybrid", "precision.backend=emulated", "model.dropout=0.1"]
IDS_OF_BYTES = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(0), dtype=torch.int32)


class PowerCutError(Exception):
    """What ends `train_until`."""


def train_until(step, folder, *overrides, base=SMALL):
    """Run, and end after `step` by an exception between two steps, as a machine that stops; its checkpoints stay."""
    from gpt2_fp8.callbacks.progress import LogLine

    def cut(self, trainer, *_):
        if trainer.global_step == step:
            raise PowerCutError

    with patch.object(LogLine, "on_train_batch_start", cut), pytest.raises(PowerCutError):
        train(folder, *overrides, base=base)


def command(*arguments, cwd, timeout=180, **environment):
    """`python -m gpt2_fp8.run` as a user types it."""
    return subprocess.run(
        [sys.executable, "-m", "gpt2_fp8.run", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=timeout, env=os.environ | environment,
    )  # fmt: skip


def forked(*arguments, cwd, **options):
    """The same in a process that has imported torch already: where no more is asked of it than to be another one."""
    ranks = "trainer=ddp" in arguments
    return forkserver.python("-m", "gpt2_fp8.run", *arguments, cwd=cwd, ranks=ranks, **options)


def record_steps(monkeypatch):
    """Every later training step adds (step, hash of its tokens, loss as hex) to the list returned."""
    from gpt2_fp8.engine.training_step import TrainingStep

    steps = []
    original = TrainingStep.settle

    def settle(self):
        unsettled = self._unsettled
        try:
            original(self)
        finally:
            if unsettled is not None:
                tokens = hashlib.sha256(unsettled.attempt.ids.cpu().numpy().tobytes()).hexdigest()[:16]
                steps.append((self.schedule.last_epoch, tokens, self._last.read().loss.hex()))

    monkeypatch.setattr(TrainingStep, "settle", settle)
    return steps


def recorded(folder, *overrides):
    """Run in this process; returns its steps, as `record_steps` notes them, and its log, as `metrics` reads it."""
    with pytest.MonkeyPatch.context() as patch:
        steps = record_steps(patch)
        train(folder, *overrides)
    return steps, metrics(folder)


def summary(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def metrics(folder):
    """metrics.csv as {column: {step: value}}."""
    columns = {}
    with (Path(folder) / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for column, value in row.items():
                if value:
                    columns.setdefault(column, {})[int(row["step"])] = float(value)
    return columns


def checkpoint(folder, step):
    return Path(folder) / "checkpoints" / f"step-{step:08d}"


def assert_same_checkpoint(one, other, averages=True):
    """Weights, their average, optimizer, schedule, random numbers and data position, bit for bit."""
    left, right = read(one), read(other)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "rng", "global_step"):
        assert_equal(left[key], right[key], key)
    if averages:
        assert_equal(*(state["training_step"].get("average") for state in (left, right)), "average")
    for data in (left["TokenDataModule"], right["TokenDataModule"]):
        data.pop("documents", None)  # counted as read: it depends on how far ahead a leg has read
    assert_equal(left["TokenDataModule"], right["TokenDataModule"], "data")


def assert_equal(left, right, path):
    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_equal(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for i, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_equal(one, other, f"{path}[{i}]")
    else:
        assert left == right, path

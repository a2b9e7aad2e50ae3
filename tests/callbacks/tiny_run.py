"""A run small enough for tests and real where it matters: manual optimization, one loader item an optimizer step,
dropout, AdamW, a schedule, a loader that remembers its place, and our callbacks and loggers around it.

`python tiny_run.py FOLDER SIGNAL STEP` sends itself SIGNAL in step STEP and exits as a run would; where torchrun's
variables make it one rank of several, the highest does.
"""

from __future__ import annotations

import csv
import errno
import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from gpt2_fp8.callbacks.checkpointing import Checkpointing
from gpt2_fp8.callbacks.graceful_stop import GracefulStop
from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.files import read_manifest
from gpt2_fp8.config.errors import Stopped
from gpt2_fp8.config.schema import LoggerConfig
from gpt2_fp8.runtime import rng
from gpt2_fp8.train.loggers import build_files
from gpt2_fp8.train.trainer import FolderCheckpointIO
from tests import forkserver
from tests.ports import free_port


def fail_for(monkeypatch, steps):
    """Have the disk be full whenever one of `steps` is written."""
    write = files.write

    def full(path, checkpoint):
        if checkpoint["global_step"] in steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, checkpoint)

    monkeypatch.setattr(files, "write", full)


def two_ranks(command):
    """Run `command` as two ranks, as torchrun would; returns their processes, ended, and [stdout, stderr] of each."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        forkserver.Popen(command, env=os.environ | common | {"RANK": rank, "LOCAL_RANK": rank}, **pipes)
        for rank in ("0", "1")
    ]
    try:
        return ranks, [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


class Loader:
    """`length` batches of shape (4, 8), each made from its index; continues where its state says."""

    def __init__(self, length: int):
        self.length, self.position = length, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        while self.position < self.length:
            self.position += 1
            yield torch.randn(4, 8, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Tiny(LightningModule):
    """`val_losses` ({step: value}) replaces what validation finds; `losses` and `validated` record what ran."""

    def __init__(self, length: int, val_losses=None):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))
        self.length, self.val_losses = length, val_losses or {}
        self.losses: dict[int, float] = {}
        self.validated: list[int] = []
        self._rng = None

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = (self.net(batch) - batch).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        self.losses[self.global_step] = loss.item()
        self.log("train_loss", loss.detach())
        self.log("step", float(self.global_step))

    def validation_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch).square().mean()
        self.log("val_loss", self.val_losses.get(self.global_step, loss), on_step=False, on_epoch=True)
        self.log("step", float(self.global_step), on_step=False, on_epoch=True)

    def on_validation_end(self):
        self.validated.append(self.global_step)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["rng"] = rng.gather()

    def on_load_checkpoint(self, checkpoint):
        self._rng = checkpoint["rng"]

    def on_train_start(self):
        if self._rng:
            rng.begin_rank(self._rng, seed=0, step=self.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))]

    def train_dataloader(self):
        return Loader(self.length)

    def val_dataloader(self):
        data = torch.randn(12, 8, generator=torch.Generator().manual_seed(1000))
        # A generator of its own: without one every validation draws a number from torch's global generator, and a
        # checkpoint of the midst of a validation would have it drawn twice.
        return torch.utils.data.DataLoader(data, batch_size=4, generator=torch.Generator())


class At(Callback):
    """Calls `action` in `hook` of step `step` (the one that runs), before any checkpoint of that hook is taken."""

    def __init__(self, hook: str, step: int, action):
        self.hook, self.step, self.action = hook, step, action
        setattr(self, hook, self._call)

    def _call(self, trainer, *_):
        if trainer.global_step == self.step:
            self.action()


def run(
    folder, max_steps=12, ckpt_path="last", every=2, keep=3, val=4, length=1000, callbacks=(), val_losses=None, ranks=1,
    **tiers_options,
):  # fmt: skip
    """One leg of a run in `folder`; (module, trainer, tiers). `ckpt_path` is as the user gives it."""
    warnings.filterwarnings("ignore")
    folder = Path(folder)
    path = pointers.resolve(ckpt_path, folder / "checkpoints") if ckpt_path else None
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):  # a checkpoint has the state of all three
        seed(0)
    module = Tiny(length, val_losses)
    tiers = Checkpointing(folder / "checkpoints", every, keep, **tiers_options)
    step = read_manifest(path)["global_step"] if path else None
    with GracefulStop(tiers.save_now) as stop:
        trainer = Trainer(
            accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_steps=max_steps,
            max_epochs=-1, val_check_interval=val, check_val_every_n_epoch=None, num_sanity_val_steps=0,
            log_every_n_steps=1, plugins=[FolderCheckpointIO()], callbacks=[tiers, stop, *callbacks],
            logger=build_files(LoggerConfig(tensorboard=True, csv=True), folder, step), enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, ckpt_path=path)
    return module, trainer, tiers


def rows(folder):
    """metrics.csv as a list of (step, column, text), which is what must not depend on interruptions."""
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        cells = [(int(row["step"]), key, value) for row in csv.DictReader(file) for key, value in row.items() if value]
    return [cell for cell in cells if cell[1] != "step"]


def kill(signum):
    return lambda: os.kill(os.getpid(), signum)


def main():
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    signum = getattr(signal, sys.argv[2])
    hooks = [At("on_train_batch_start", int(sys.argv[3]), kill(signum))] if rank == ranks - 1 else []
    try:
        run(sys.argv[1], every=0, val=4, max_steps=400, callbacks=hooks, ranks=ranks)
    except Stopped as stopped:
        print(stopped)
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main()

"""A script of one's own under `Trainer(strategy="ddp")`: two processes on a CPU, joined by gloo."""

import json

import pytest

from gpt2_fp8.checkpoint import files
from tests import forkserver
from tests.ranks import ALONE, TWO
from tests.runs import assert_equal, checkpoint, forked, metrics

SCRIPT = """
import json, os
from pathlib import Path
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from gpt2_fp8 import FolderCheckpointIO, FP8Precision, GPT2Module, TokenDataModule, load_config

WORDS = {words}

def in_the_backward(state, bucket):
    Path("exchanged-in-a-backward").touch()
    return allreduce_hook(None, bucket)

def on_train_start(trainer, module):
    trainer.strategy.model.register_comm_hook(None, in_the_backward)

def trainer(config, **options):
    plugins = [FP8Precision.from_config(config), FolderCheckpointIO()]
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    return Trainer(plugins=plugins, val_check_interval=5, **quiet, **options)

def main():
    config, told = load_config(*WORDS), {{}}
    two = dict(strategy="ddp", devices=2)
    seed_everything(config.seed)
    module, data = GPT2Module(config), TokenDataModule.from_config(config)
    every = ModelCheckpoint("own", every_n_train_steps=1, save_top_k=-1, filename="{{step}}")
    made = trainer(config, max_steps=8, callbacks=[every, LambdaCallback(on_train_start=on_train_start)], **two)
    made.fit(module, datamodule=data)
    told["fit"] = module.val_loss
    told["validate"] = made.validate(module, datamodule=data, verbose=False)[0]["val_loss"]
    module = GPT2Module(config)
    last = trainer(config, callbacks=[ModelCheckpoint("last", filename="{{step}}", save_last=True)], **two)
    last.fit(module, datamodule=TokenDataModule.from_config(config), ckpt_path="own/step=6.ckpt")
    told["resumed"] = module.val_loss
    Path("told-" + os.environ.get("LOCAL_RANK", "0")).write_text(json.dumps(told))

if __name__ == "__main__":
    main()
"""
ONLY_THE_PROGRAM = ("callbacks.", "trainer.log_every_n_steps", "trainer.val_check_interval")
WORDS = [word for word in TWO if not word.startswith(ONLY_THE_PROGRAM)]


def test_two_processes_compute_what_the_programs_do(tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT.format(words=WORDS))
    forkserver.python("own.py", cwd=tmp_path, timeout=300, ranks=True, code=0, **ALONE)
    forked(*TWO, "run_name=run", "callbacks.keep_checkpoints=9", cwd=tmp_path, code=0, **ALONE)
    assert not (tmp_path / "exchanged-in-a-backward").exists(), "DistributedDataParallel leaves the gradients alone"
    run = tmp_path / "outputs/run"
    own, theirs = files.read(tmp_path / "own/step=8.ckpt"), files.read(checkpoint(run, 8))
    for key in ("state_dict", "optimizer_states", "rng"):
        assert_equal(own[key], theirs[key], key)
    continued = files.read(tmp_path / "last/last.ckpt")["state_dict"]
    assert_equal(continued, files.read(checkpoint(run, 12))["state_dict"], "continued")
    one, other = (json.loads((tmp_path / f"told-{rank}").read_text()) for rank in (0, 1))
    assert one == other
    assert one["fit"] == one["validate"]
    assert one["resumed"] == pytest.approx(metrics(run)["val_loss"][12], rel=1e-6)

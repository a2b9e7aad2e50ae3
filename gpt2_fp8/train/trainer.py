"""Lightning's Trainer: what a run tells it, its processes included, and what one's own must not contradict."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from gpt2_fp8.checkpoint import files
from gpt2_fp8.compat import lightning_private
from gpt2_fp8.config import disk
from gpt2_fp8.config.checks import check_batch
from gpt2_fp8.config.errors import Problem, SharedRefusal, UserError
from gpt2_fp8.config.run_length import last_step, steps_to_run
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import shorten
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.fp8.resolve import Plan
from gpt2_fp8.runtime import collectives, devices, ranks
from gpt2_fp8.train.precision_plugin import FP8Precision, RunPrecision
from gpt2_fp8.train.strategies import RanksStrategy, ShardedStrategy

_QUIET = (
    *("lightning.pytorch", "lightning.fabric"),
    *("datasets", "huggingface_hub", "httpx", "httpx2"),  # a line for each file and each request
    "TransformerEngine",  # whether torch.compile takes it
)
# Warnings of libraries about themselves.
_USELESS: dict[str, type[Warning]] = {
    ".*cannot be converted to a JitArgument": UserWarning,  # of FlashAttention 4 by cutlass
    r"invalid escape sequence '\\\.'": SyntaxWarning,  # in torchao 0.18
    r'Be aware .*callbacks: \["EarlyStop\{[^}]*\}"\]': UserWarning,  # a resume may leave its key out
}
# Names of places, which may be another one on each node. What is read there is compared.
_PLACES = (
    *("run_name", "ckpt_path", "init_from", "tags", "notes"),
    *("data.cache_dir", "data.train_files", "data.val_files", "data.path", "data.tokenizer", "data.sources"),
    "data.validation",
)
_SHOWN = 80  # characters of a value in which ranks differ
_LIGHTNINGS_OWN = 1000  # epochs, where a Trainer is told of neither epochs nor steps


def build_trainer(
    config: RunConfig, plan: Plan, folder: Path, callbacks: list[Callback], loggers: list[Logger]
) -> pl.Trainer:
    """Build Lightning's Trainer. A run is one Lightning epoch of `max_steps` batches, whatever the corpus' epochs are.

    Raises UserError if there are more processes than GPUs.
    """
    options, place, on_gpu = config.trainer, ranks.current(), plan.device == "cuda"
    seen, count = torch.cuda.device_count() if on_gpu else 0, devices.devices(config, plan.device)
    environment: ClusterEnvironment = LightningEnvironment()  # whatever Lightning would detect
    if place.several:
        environment = LaunchedEnvironment(devices.place(place, seen) if on_gpu else place.local_rank)
    return pl.Trainer(
        accelerator=plan.device,
        devices=min(place.local_world_size, seen) if on_gpu and place.several else count,
        num_nodes=options.num_nodes,
        strategy=_build_strategy(config) if place.several or count * options.num_nodes > 1 else options.strategy,
        max_steps=steps_to_run(config),
        max_epochs=-1,
        val_check_interval=min(options.val_check_interval, last_step(config)),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        limit_val_batches=0 if config.data.val_sequences == 0 else None,
        log_every_n_steps=options.log_every_n_steps,
        deterministic=options.deterministic,
        fast_dev_run=options.fast_dev_run,
        profiler=SimpleProfiler(folder, "profile") if options.profiler == "simple" else None,
        plugins=[RunPrecision(plan), FolderCheckpointIO(), environment],
        callbacks=callbacks,
        logger=loggers,
        enable_checkpointing=not options.fast_dev_run,
        enable_progress_bar=any(isinstance(callback, LightningBar) for callback in callbacks),
        enable_model_summary=False,
        enable_autolog_hparams=False,  # they lie in the run's folder, and in its checkpoints
        inference_mode=False,  # delayed scaling's tensors may be allocated in validation and change in training
        use_distributed_sampler=False,
        default_root_dir=folder,
    )


def _build_strategy(config: RunConfig) -> DDPStrategy:
    return ShardedStrategy(config) if config.trainer.strategy == "fsdp" else RanksStrategy()


class FolderCheckpointIO(CheckpointIO):
    """Saves and loads checkpoints as folders of safetensors and JSON: `Trainer(plugins=[FolderCheckpointIO()])`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` as the folder `path`, complete and durable when it returns. On global rank zero.

        `storage_options`, those of `Trainer.save_checkpoint`: None, or a function (path, checkpoint) that does it.
        """
        (storage_options or files.write)(path, checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the folder `path`. `weights_only` is about unpickling, which never happens here."""
        return files.read(path, map_location)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the folder `path`, if it is a checkpoint."""
        files.remove(path)


def write_folders(trainer: pl.Trainer) -> None:
    """Have a Trainer write and read folders where it would pickle, as Lightning does by itself."""
    io = trainer.strategy.checkpoint_io
    is_async = isinstance(io, AsyncCheckpointIO)
    inner = io.checkpoint_io if isinstance(io, AsyncCheckpointIO) else io
    if isinstance(inner, TorchCheckpointIO):
        folders = FolderCheckpointIO()
        trainer.strategy.checkpoint_io = AsyncCheckpointIO(folders) if is_async else folders


class LaunchedEnvironment(TorchElasticEnvironment):
    """Processes that a launcher has started: their number is the launcher's. `index`: of this one's device."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def local_rank(self) -> int:
        """Return the index of this process's device among those that it sees, which may be one (srun)."""
        return self._index

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any number of devices."""


class SameRun(Callback):
    """Compares once what this rank is about to train with what the others are.

    Ranks that differ would go on: gradients of other models of equal shapes can be averaged, or those of other text,
    and each kernel rounds in its own way.

    Args:
        config: the run's.
        versions: of what could change a number.
        kernels: what computes, by the part of the model, in words.
        folder: the run's, which nodes may not share. Rank 0 holds it.
    """

    def __init__(
        self, config: RunConfig, versions: Mapping[str, str | None], kernels: Mapping[str, str], folder: Path
    ) -> None:
        self._facts = {"settings": _flat(asdict(config)), "versions": dict(versions), "kernels": dict(kernels)}
        self._folder = folder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare before anything is computed. Collective. Raises SharedRefusal, the same on all ranks."""
        identity = getattr(getattr(trainer, "datamodule", None), "identity", dict)
        holder = disk.read_holder(self._folder)
        own = self._facts | {"text": identity()}
        told = [json.loads(facts) for facts in collectives.everyones(json.dumps([own, holder], default=str))]
        problems = list(_differences([facts for facts, _ in told]))
        if others := [rank for rank, (_, seen) in enumerate(told) if seen != told[0][1]]:
            cause = f"rank {others[0]} does not see the run's folder of rank 0, {self._folder}"
            problems.append(Problem(cause, "hydra.run.dir=FOLDER, on a file system that all nodes share"))
        if problems:
            raise SharedRefusal(problems)


def _differences(facts: Sequence[Mapping[str, Mapping[str, Any]]]) -> Iterator[Problem]:
    """Yield a problem for each kind of fact in which any rank differs from rank 0, with the first such rank."""
    for kind, first in facts[0].items():
        rank = next((rank for rank, of_rank in enumerate(facts) if of_rank[kind] != first), 0)
        own = facts[rank][kind]
        shown = [
            f"{name} {shorten(str(own.get(name, 'none')), _SHOWN)} instead of "
            f"{shorten(str(first.get(name, 'none')), _SHOWN)}"
            for name in {**first, **own}
            if own.get(name) != first.get(name)
        ]
        if rank:
            yield Problem(f"rank {rank} has other {kind} than rank 0: {'; '.join(shown)}")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their whole keys, without the names of places."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        key = prefix + name
        if key not in _PLACES:
            found |= _flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return found


def check_trainer(trainer: pl.Trainer, config: RunConfig) -> None:
    """Raise UserError with everything in which `trainer`, which may be anyone's, contradicts `config`.

    It may stop earlier. Lightning itself refuses to clip or accumulate gradients under manual optimization.
    """
    found = list(_check_precision(trainer, config))
    if lightning_private.forks_or_spawns(trainer.strategy.launcher):
        cause = "the Trainer's strategy forks or spawns its processes, and the trained module would stay in them"
        found.append(Problem(cause, "Trainer(strategy='ddp') in a script; in a notebook, devices=1"))
    if trainer.state.fn == TrainerFn.FITTING:
        found += _check_fit(trainer, config)
    if found:
        raise UserError(found)
    check_batch(config, trainer.world_size)


def _check_precision(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
    plugin = trainer.precision_plugin
    if not isinstance(plugin, RunPrecision):
        name = type(plugin).__name__ if isinstance(plugin, FP8Precision) else repr(plugin.precision)
        cause = f"the Trainer's precision is {name}, and the configuration's {config.precision.name}"
        yield Problem(cause, "Trainer(plugins=[FP8Precision.from_config(config), ...]), without precision=")
        return
    of = plugin.plan.backend.config
    if (of.model, of.precision, of.recipe) != (config.model, config.precision, config.recipe):
        cause = "the Trainer's FP8Precision is of another configuration than the module"
        yield Problem(cause, "build both from one: FP8Precision.from_config(config), GPT2Module(config)")
    if (kind := trainer.strategy.root_device.type) != plugin.plan.device:
        yield Problem(f"the Trainer computes on {kind!r}, and FP8Precision was made for {plugin.plan.device!r}")


def _check_fit(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
    """Find steps after the schedule's end, a divided model, averaged weights, and another configuration's text."""
    steps, epochs = last_step(config), trainer.max_epochs or 0
    if trainer.max_steps > steps:
        cause = f"Trainer(max_steps={trainer.max_steps}) goes on after the end of trainer.max_steps={steps}"
        yield Problem(cause, f"load_config('trainer.max_steps={trainer.max_steps}')")
    if epochs > 1 and not (epochs == _LIGHTNINGS_OWN and trainer.max_steps == -1):
        cause = f"Trainer(max_epochs={epochs}): a whole run of trainer.max_steps={steps} is one epoch"
        yield Problem(cause, f"max_epochs=1; for as many steps, load_config('trainer.max_steps={epochs * steps}')")
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        yield Problem(f"Trainer(strategy=...) is a {type(trainer.strategy).__name__}, which divides the model", "'ddp'")
    if config.trainer.strategy == "fsdp" and not isinstance(trainer.strategy, ShardedStrategy):
        yield Problem("trainer=fsdp: only python -m gpt2_fp8.run divides a model", "leave it out")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            cause = f"{type(callback).__name__} reads weights before it is known whether the step's update was made"
            yield Problem(cause, "load_config('optim.ema_decay=0.999')")
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, TokenDataModule) or not data.is_of(config):
        cause = "the module trains on a TokenDataModule of its own configuration, and the Trainer has none"
        yield Problem(cause, "Trainer.fit(module, datamodule=TokenDataModule.from_config(config))")


def quiet_logs() -> None:
    """Leave the log to this run, on one rank. What libraries say on another rank is in the file of that rank alone."""
    if not ranks.is_first_rank():
        logging.getLogger("gpt2_fp8").setLevel(logging.WARNING)
        logging.captureWarnings(True)
        for handler in logging.getLogger().handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(logging.Filter("gpt2_fp8"))
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    lightning_private.ignore_warnings(whole_run=True)
    for message, category in _USELESS.items():
        warnings.filterwarnings("ignore", message=message, category=category)

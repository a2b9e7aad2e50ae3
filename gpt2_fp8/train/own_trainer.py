"""Whether a Lightning Trainer, which may be anyone's, does what the configuration says.

It may stop earlier. All else that it could say otherwise is refused, with the key of the configuration that says it.
So are processes and checkpoints of a kind that this program does not work with.
"""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed

from gpt2_fp8.compat import lightning_process
from gpt2_fp8.config.checks import check_batch
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.run_length import last_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.runtime import devices
from gpt2_fp8.train import checkpoint_io, strategy
from gpt2_fp8.train.precision_plugin import FP8Precision, RunPrecision

_LIGHTNINGS_OWN = 1000  # epochs, where a Trainer is told of neither epochs nor steps


def check(trainer: pl.Trainer, config: RunConfig) -> None:
    """Raise UserError with everything in which `trainer` and `config` contradict each other."""
    found = [*_plugin(trainer, config), *_processes(trainer)]
    if trainer.state.fn == TrainerFn.FITTING:
        for look in (_checkpoints, _averages, _devices, _length, _steps, _data):
            found += look(trainer, config)
    if found:
        raise UserError(found)
    check_batch(config, trainer.world_size)


def _plugin(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
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
        cause = f"the Trainer computes on {kind!r}, and FP8Precision was made for {plugin.plan.device!r}"
        name = "gpu" if plugin.plan.device == "cuda" else "cpu"
        remedy = f"Trainer(accelerator={name!r})" + (", or load_config('trainer=cpu')" if kind == "cpu" else "")
        yield Problem(cause, remedy)


def _processes(trainer: pl.Trainer) -> Iterator[Problem]:
    """Find a Trainer whose processes are not those that divide the text, or that takes the trained module along."""
    if lightning_process.forks_or_spawns(trainer.strategy.launcher):
        cause = "the Trainer's strategy forks or spawns its processes, and the trained module would stay in them"
        yield Problem(cause, "Trainer(strategy='ddp') in a script; in a notebook, devices=1")
        return
    there = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else None
    if there not in (None, trainer.world_size):
        cause = f"the Trainer's world_size is {trainer.world_size}, and the text is divided by {there} already"
        yield Problem(cause, "the devices=, num_nodes= and strategy= of the Trainer before it; or a script of its own")


def _checkpoints(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
    if trainer.checkpoint_callbacks and checkpoint_io.pickles(trainer):
        cause = "the Trainer's checkpoints would be pickles, which are neither read nor written here"
        yield Problem(cause, checkpoint_io.REMEDY)


def _averages(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
    """Find callbacks whose averaged weights no checkpoint would give back."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            cause = f"Trainer(callbacks=[{type(callback).__name__}(...)]) averages the weights of several steps, and a "
            cause += "checkpoint here holds those of one"
            yield Problem(
                cause, "leave it out; ModelCheckpoint(every_n_train_steps=NUMBER, save_top_k=-1) keeps several"
            )


def _devices(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
    options, number = config.trainer, strategy.devices(config, devices.device(config))
    if (trainer.num_nodes, trainer.num_devices) != (options.num_nodes, number):
        cause = f"the Trainer has {trainer.num_devices} devices on each of {trainer.num_nodes} machines, and the "
        cause += f"configuration trainer.devices={options.devices}, trainer.num_nodes={options.num_nodes}"
        remedy = f"load_config('trainer.devices={trainer.num_devices}', 'trainer.num_nodes={trainer.num_nodes}')"
        yield Problem(cause, f"{remedy}, or the Trainer's devices= and num_nodes= as there")
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        cause = f"Trainer(strategy=...) is a {type(trainer.strategy).__name__}, which divides the model"
        yield Problem(cause, "Trainer(strategy='ddp') on several GPUs, 'auto' on one")


def _length(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
    steps, epochs = last_step(config), trainer.max_epochs or 0
    if trainer.max_steps > steps:
        cause = f"Trainer(max_steps={trainer.max_steps}) goes on after the end of trainer.max_steps={steps}"
        yield Problem(cause, f"load_config('trainer.max_steps={trainer.max_steps}'): the learning rate ends there too")
    if epochs > 1 and not (epochs == _LIGHTNINGS_OWN and trainer.max_steps == -1):
        cause = f"Trainer(max_epochs={epochs}): a whole run of trainer.max_steps={steps} is one epoch"
        yield Problem(cause, f"max_epochs=1; for as many steps, load_config('trainer.max_steps={epochs * steps}')")
    if (trainer.min_steps or 0) > steps or (trainer.min_epochs or 0) > 1:
        cause = f"Trainer(min_steps={trainer.min_steps}, min_epochs={trainer.min_epochs}) is more than "
        yield Problem(f"{cause}trainer.max_steps={steps}", "leave it out, or load_config('trainer.max_steps=NUMBER')")


def _steps(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
    """Find settings by which Lightning would take part in a step, which the module computes alone."""
    if clip := trainer.gradient_clip_val:
        cause = f"Trainer(gradient_clip_val={clip}): gradients are clipped by the configuration"
        cause += f" to optim.max_grad_norm={config.optim.max_grad_norm:g}"
        yield Problem(cause, f"load_config('optim.max_grad_norm={clip}')")
    if (parts := trainer.accumulate_grad_batches) != 1:
        cause = f"Trainer(accumulate_grad_batches={parts}): the configuration divides a step into forward passes"
        yield Problem(cause, "load_config('global_batch_size=NUMBER', 'micro_batch_size=NUMBER'), counted in sequences")
    if repeated := trainer.overfit_batches:  # type: ignore[attr-defined]
        cause = f"Trainer(overfit_batches={repeated}): the data module repeats a run's first steps"
        yield Problem(cause, f"load_config('trainer.overfit_batches={max(1, int(repeated))}')")


def _data(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
    data, remedy = trainer.datamodule, "Trainer.fit(module, datamodule=TokenDataModule.from_config(config))"  # type: ignore[attr-defined]
    if not isinstance(data, TokenDataModule):
        yield Problem("the module trains on a TokenDataModule, and the Trainer was given none", remedy)
    elif not data.is_of(config):
        yield Problem("the data module is of another configuration than the module", remedy)

"""Whether a Lightning Trainer, which may be anyone's, does what the configuration says. It may stop earlier."""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from gpt2_fp8.compat import lightning_private
from gpt2_fp8.config.checks import check_batch
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.run_length import last_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.runtime import devices
from gpt2_fp8.train import process
from gpt2_fp8.train.precision_plugin import FP8Precision, RunPrecision

_LIGHTNINGS_OWN = 1000  # epochs, where a Trainer is told of neither epochs nor steps


def check(trainer: pl.Trainer, config: RunConfig) -> None:
    """Raise UserError with everything in which `trainer` and `config` contradict each other.

    Lightning itself refuses to clip or to accumulate the gradients of a module with manual optimization.
    """
    found = list(_check_precision(trainer, config))
    if lightning_private.forks_or_spawns(trainer.strategy.launcher):
        cause = "the Trainer's strategy forks or spawns its processes, and the trained module would stay in them"
        found.append(Problem(cause, "Trainer(strategy='ddp') in a script; in a notebook, devices=1"))
    if trainer.state.fn == TrainerFn.FITTING:
        for look in (_check_devices, _check_length, _check_parts):
            found += look(trainer, config)
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
        cause = f"the Trainer computes on {kind!r}, and FP8Precision was made for {plugin.plan.device!r}"
        yield Problem(cause, f"Trainer(accelerator={'gpu' if plugin.plan.device == 'cuda' else 'cpu'!r})")


def _check_devices(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
    """Find other ranks than those that divide the text, or that divide the model."""
    options, number = config.trainer, process.devices(config, devices.device(config))
    if (trainer.num_nodes, trainer.num_devices) != (options.num_nodes, number):
        cause = f"the Trainer has {trainer.num_devices} devices on each of {trainer.num_nodes} machines, and the "
        cause += f"configuration trainer.devices={options.devices}, trainer.num_nodes={options.num_nodes}"
        yield Problem(
            cause, f"load_config('trainer.devices={trainer.num_devices}', 'trainer.num_nodes={trainer.num_nodes}')"
        )
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        cause = f"Trainer(strategy=...) is a {type(trainer.strategy).__name__}, which divides the model"
        yield Problem(cause, "Trainer(strategy='ddp') on several GPUs, 'auto' on one")


def _check_length(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
    """Find a Trainer that goes on after the schedule's end. A whole run is one epoch."""
    steps, epochs = last_step(config), trainer.max_epochs or 0
    if trainer.max_steps > steps:
        cause = f"Trainer(max_steps={trainer.max_steps}) goes on after the end of trainer.max_steps={steps}"
        yield Problem(cause, f"load_config('trainer.max_steps={trainer.max_steps}')")
    if epochs > 1 and not (epochs == _LIGHTNINGS_OWN and trainer.max_steps == -1):
        cause = f"Trainer(max_epochs={epochs}): a whole run of trainer.max_steps={steps} is one epoch"
        yield Problem(cause, f"max_epochs=1; for as many steps, load_config('trainer.max_steps={epochs * steps}')")


def _check_parts(trainer: pl.Trainer, config: RunConfig) -> Iterator[Problem]:
    """Find other text than the configuration's, and averaged weights, which no checkpoint would give back."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            cause = f"{type(callback).__name__} averages the weights of several steps, and a checkpoint holds one's"
            yield Problem(
                cause, "leave it out; ModelCheckpoint(every_n_train_steps=NUMBER, save_top_k=-1) keeps several"
            )
    data, remedy = trainer.datamodule, "Trainer.fit(module, datamodule=TokenDataModule.from_config(config))"  # type: ignore[attr-defined]
    if not isinstance(data, TokenDataModule):
        yield Problem("the module trains on a TokenDataModule, and the Trainer was given none", remedy)
    elif not data.is_of(config):
        yield Problem("the data module is of another configuration than the module", remedy)

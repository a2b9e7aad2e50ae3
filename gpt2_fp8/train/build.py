"""From a configuration to the parts of a run. Everything that Lightning's Trainer is told is told here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.backends.resolve import Plan
from gpt2_fp8.callbacks.divergence import DivergenceGuard
from gpt2_fp8.callbacks.fp8_health import FP8HealthLog
from gpt2_fp8.callbacks.histograms import Histograms
from gpt2_fp8.callbacks.kernels_in_use import KernelsInUse
from gpt2_fp8.callbacks.log_line import LogLine
from gpt2_fp8.callbacks.peak_memory import PeakMemory
from gpt2_fp8.callbacks.progress import ProgressBar
from gpt2_fp8.callbacks.run_labels import RunLabels
from gpt2_fp8.callbacks.same_run import SameRun
from gpt2_fp8.callbacks.samples import Samples
from gpt2_fp8.callbacks.throughput import Throughput
from gpt2_fp8.callbacks.time_limit import TimeLimit
from gpt2_fp8.config import own_words
from gpt2_fp8.config.run_length import last_step, steps_to_run
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.engine.run_watch import RunWatch
from gpt2_fp8.kernels import libraries
from gpt2_fp8.runtime import registry
from gpt2_fp8.train import hyper_parameters, setup, strategy, summary
from gpt2_fp8.train.checkpoint_io import FolderCheckpointIO
from gpt2_fp8.train.fp8_csv import FP8File
from gpt2_fp8.train.loggers import build_loggers, build_services
from gpt2_fp8.train.module import GPT2Module
from gpt2_fp8.train.precision_plugin import RunPrecision
from gpt2_fp8.train.services import Identity

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """The parts of a run, ready to fit."""

    plan: Plan
    trainer: pl.Trainer
    module: GPT2Module
    data: TokenDataModule
    throughput: Throughput
    memory: PeakMemory
    kernels: KernelsInUse


def build(
    config: RunConfig,
    plan: Plan,
    folder: Path,
    checkpoint: Path | None,
    time_limit: TimeLimit,
    divergence: DivergenceGuard,
    log_line: LogLine,
    ends: list[Callback],
    words: Sequence[str] = (),
    in_sweep: bool = False,
) -> Parts:
    """Build the parts of a run in `folder`.

    Args:
        checkpoint: what the run continues from, or None.
        time_limit: the first callback: it decides whether a step is the last.
        log_line: writes the log's lines; it outlives a rollback.
        ends: the callbacks that save and stop. Lightning moves them behind all others, in their order.
        words: the run's overrides; `in_sweep`: they are those of a job.

    Raises UserError for weights or a tokenizer that are not there.
    """
    pl.seed_everything(config.seed, workers=True, verbose=False)
    data = TokenDataModule.from_config(config)
    module = GPT2Module(config, config.model.vocab_size or data.vocab_size)
    throughput = Throughput(config, module.vocab_size)
    memory = PeakMemory()
    of_size = partial(plan.backend.kernels, module.vocab_size)
    kernels = KernelsInUse(of_size, config.micro_batch, plan.backend.slower())
    throughput.readers.append(log_line.write)
    health = _fp8_health(config, plan, folder, checkpoint, words)
    callbacks: list[Callback] = [time_limit, log_line, throughput, *health, memory]
    if config.logger.histograms_every_n_steps and not config.trainer.fast_dev_run:
        callbacks.append(Histograms(config.logger.histograms_every_n_steps, last_step(config)))
    callbacks += [SameRun(asdict(config), summary.versions(), kernels.found | _versions(plan)), kernels]
    callbacks += _chosen(config, throughput, log_line)
    labels = hyper_parameters.hyper_parameters(config, words)
    callbacks.append(RunLabels(labels, hyper_parameters.as_text(config)))
    callbacks.append(divergence)
    if not config.trainer.fast_dev_run:
        callbacks += ends
    identity = Identity.of(config, folder, in_sweep)
    trainer = build_trainer(config, plan, folder, callbacks, checkpoint, identity)
    return Parts(plan, trainer, module, data, throughput, memory, kernels)


def _chosen(config: RunConfig, throughput: Throughput, log_line: LogLine) -> list[Callback]:
    """Return samples, the progress bar and the user's own, as chosen; what reads numbers is told to `throughput`."""
    callbacks: list[Callback] = []
    if config.callbacks.red_flags:
        watch = RunWatch(config.optim.warmup_steps, config.data.num_workers, partial(log.warning, "%s"))
        throughput.readers.append(rank_zero_only(watch.see))
    if config.callbacks.sample_tokens:
        callbacks.append(Samples(config.callbacks.sample_prompt, config.callbacks.sample_tokens, config.seed))
    extra = [registry.make("callbacks.extra", name, Callback, config) for name in config.callbacks.extra]
    if config.callbacks.progress_bar and not any(isinstance(callback, LightningBar) for callback in extra):
        callbacks.append(bar := ProgressBar(log_line.pace))
        throughput.readers.append(bar.read)
    return callbacks + extra


def _fp8_health(
    config: RunConfig, plan: Plan, folder: Path, checkpoint: Path | None, words: Sequence[str]
) -> list[Callback]:
    """Return what logs the health of a run's FP8 tensors; nothing for a run without FP8."""
    if not config.callbacks.fp8_health or plan.recipe is None:
        return []
    written = config.logger.csv and not config.trainer.fast_dev_run
    write = FP8File(folder, setup.step_of(checkpoint)).write if written else None
    return [FP8HealthLog(config, write, "callbacks.fp8_health_every_n_steps" in own_words.keys(words))]


def _versions(plan: Plan) -> dict[str, str]:
    """Of what computes."""
    if plan.device == "cpu":
        return {"torch": torch.__version__}
    return {"torch": torch.__version__, "GPU": torch.cuda.get_device_name()} | libraries.versions()


def _loggers(config: RunConfig, folder: Path, checkpoint: Path | None, identity: Identity) -> list[Logger]:
    """Build the run's own logs, those of services, and the loggers of plugins."""
    own = build_loggers(config.logger, folder, setup.step_of(checkpoint))
    own += build_services(config, folder, identity, resumed=checkpoint is not None)
    return own + [registry.make("logger.extra", name, Logger, config, folder) for name in config.logger.extra]


def build_trainer(
    config: RunConfig,
    plan: Plan,
    folder: Path,
    callbacks: list[Callback],
    checkpoint: Path | None,
    identity: Identity,
) -> pl.Trainer:
    """Lightning's Trainer. A run is one Lightning epoch of `max_steps` batches, whatever the corpus' epochs are."""
    options = config.trainer
    return pl.Trainer(
        accelerator=plan.device,
        devices=strategy.devices(config, plan.device),
        num_nodes=options.num_nodes,
        strategy=strategy.strategy(config, plan.device),
        max_steps=steps_to_run(config),
        max_epochs=-1,
        val_check_interval=min(options.val_check_interval, last_step(config)),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        limit_val_batches=0 if config.data.val_sequences == 0 else None,
        log_every_n_steps=options.log_every_n_steps,
        deterministic=options.deterministic,
        fast_dev_run=options.fast_dev_run,
        profiler=options.profiler,
        plugins=[RunPrecision(plan), FolderCheckpointIO(), strategy.environment(config, plan.device)],
        callbacks=callbacks,
        logger=False if options.fast_dev_run else _loggers(config, folder, checkpoint, identity),
        enable_checkpointing=not options.fast_dev_run,
        enable_progress_bar=any(isinstance(callback, LightningBar) for callback in callbacks),
        enable_model_summary=False,
        enable_autolog_hparams=False,  # they lie in the run's folder, and in its checkpoints
        inference_mode=False,  # delayed scaling's tensors may be allocated in validation and change in training
        use_distributed_sampler=False,
        default_root_dir=folder,
    )

"""From a configuration to the parts of a run."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.callbacks.checkpointing import Checkpointing
from gpt2_fp8.callbacks.divergence import DivergenceGuard
from gpt2_fp8.callbacks.fp8_health import FP8HealthLog
from gpt2_fp8.callbacks.graceful_stop import GracefulStop, TimeLimit
from gpt2_fp8.callbacks.histograms import Histograms
from gpt2_fp8.callbacks.log_line import LogLine
from gpt2_fp8.callbacks.progress import ProgressBar
from gpt2_fp8.callbacks.same_run import SameRun
from gpt2_fp8.callbacks.samples import Samples
from gpt2_fp8.callbacks.throughput import PeakMemory, Throughput
from gpt2_fp8.config import own_words
from gpt2_fp8.config.run_length import last_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.engine.red_flags import RunWatch
from gpt2_fp8.fp8.resolve import Plan
from gpt2_fp8.kernels import libraries
from gpt2_fp8.runtime import registry
from gpt2_fp8.train import run_end, setup
from gpt2_fp8.train.loggers import FP8File, RunLabels, build_loggers
from gpt2_fp8.train.module import GPT2Module
from gpt2_fp8.train.run_end import RunEnd
from gpt2_fp8.train.trainer import build_trainer

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
    same_run: SameRun


def build(
    config: RunConfig,
    plan: Plan,
    checkpoint: Path | None,
    end: RunEnd,
    first: tuple[TimeLimit, LogLine],
    last: tuple[DivergenceGuard, Checkpointing, GracefulStop],
) -> Parts:
    """Build the parts of a run in the folder of `end`, which continues from `checkpoint`, if there is one.

    `first` and `last` are callbacks that outlive a rollback: what decides whether a step is the last and writes log
    lines; and what judges a step, saves and stops. Lightning moves the last two behind all others, in their order.
    """
    pl.seed_everything(config.seed, workers=True, verbose=False)
    resume_step, trial = setup.step_of(checkpoint), config.trainer.fast_dev_run
    data = TokenDataModule.from_config(config)
    module = GPT2Module(config, config.model.vocab_size or data.vocab_size)
    throughput, memory = Throughput(config, module.vocab_size), PeakMemory()
    throughput.readers.append(first[1].write)
    same_run = SameRun(
        asdict(config),
        run_end.read_versions() | _versions(plan),
        partial(plan.backend.kernels, module.vocab_size),
        config.micro_batch,
        plan.backend.slower(),
    )
    callbacks: list[Callback] = [*first, throughput]
    if config.callbacks.fp8_health and plan.recipe is not None:
        write = FP8File(end.folder, resume_step).write if config.logger.csv and not trial else None
        typed = "callbacks.fp8_health_every_n_steps" in own_words.keys(end.words)
        callbacks.append(FP8HealthLog(config, write, typed))
    callbacks.append(memory)
    if config.logger.histograms_every_n_steps and not trial:
        callbacks.append(Histograms(config.logger.histograms_every_n_steps, last_step(config)))
    callbacks += [same_run, *_chosen(config, throughput, first[1]), RunLabels(config, end.words)]
    callbacks += last[:1] if trial else last
    loggers = [] if trial else build_loggers(config, end.folder, resume_step, end.in_sweep)
    trainer = build_trainer(config, plan, end.folder, callbacks, loggers)
    return Parts(plan, trainer, module, data, throughput, memory, same_run)


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


def _versions(plan: Plan) -> dict[str, str]:
    """Of what computes."""
    if plan.device == "cpu":
        return {"torch": torch.__version__}
    return {"torch": torch.__version__, "GPU": torch.cuda.get_device_name()} | libraries.versions()

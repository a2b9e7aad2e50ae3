"""A run: what its settings mean on this machine, its parts, and `Trainer.fit`, again after each rollback."""

from __future__ import annotations

import gc
import logging
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.callbacks.checkpointing import Checkpointing
from gpt2_fp8.callbacks.early_stopping import EarlyStop
from gpt2_fp8.callbacks.fp8_health import FP8HealthLog
from gpt2_fp8.callbacks.graceful_stop import DivergenceGuard, GracefulStop, TimeLimit
from gpt2_fp8.callbacks.histograms import Histograms
from gpt2_fp8.callbacks.profiler import Profiler
from gpt2_fp8.callbacks.progress import LogLine, ProgressBar, Samples
from gpt2_fp8.callbacks.throughput import Throughput, peak_gb
from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.checkpoint.files import read_plain
from gpt2_fp8.compat import transformer_engine
from gpt2_fp8.compat.lightning_private import detach_logging
from gpt2_fp8.config import own_words, run_length
from gpt2_fp8.config.checks import check_batch
from gpt2_fp8.config.data_schema import source_key, sources_of
from gpt2_fp8.config.errors import RunError
from gpt2_fp8.config.programs import read_ranking
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.engine.divergence import RollBack
from gpt2_fp8.engine.red_flags import RunWatch
from gpt2_fp8.fp8.resolve import Plan, as_before, fallen_back, resolve
from gpt2_fp8.kernels import library_versions
from gpt2_fp8.runtime import collectives, devices, ranks, registry, rendezvous, sharding
from gpt2_fp8.runtime.programs import read_versions
from gpt2_fp8.train import setup
from gpt2_fp8.train.loggers import FP8File, RunLabels, build_loggers
from gpt2_fp8.train.module import GPT2Module
from gpt2_fp8.train.ranking import Ranking
from gpt2_fp8.train.run_end import RunEnd
from gpt2_fp8.train.trainer import SameRun, build_trainer, quiet_logs

log = logging.getLogger(__name__)


def run(config: RunConfig, end: RunEnd) -> float | None:
    """Train as `config` says, in the folder of `end`; returns the last validation loss. `train/launch.py` ends it."""
    end.first_step = 0
    if (place := ranks.current()).launcher:
        rendezvous.join(place)
    quiet_logs()
    training, error = Training(config, end), None
    try:
        with GracefulStop(training.checkpointing.save_now) as stop:
            training.prepare()
            training.fit_to_the_end(stop)
        return training.last_val_loss()
    except BaseException as caught:
        met = rendezvous.get_meeting()
        error = caught if met is None else met.explain(caught)
        if error is not caught:
            raise error from None
        raise
    finally:
        training.close(error)
        rendezvous.ending()
        if error is None or not place.launcher:  # else the GPU may wait for a lost rank, and this for the GPU
            clean_up()


class Parts(NamedTuple):
    """What lives from one rollback to the next."""

    trainer: pl.Trainer
    module: GPT2Module
    data: TokenDataModule
    throughput: Throughput


class Training:
    """A run in its process: `config` without any `auto` once it is prepared, `plan` and `checkpoint` to begin from.

    `checkpointing`, `divergence`, `time_limit` and `log_line` are callbacks that outlive a rollback; `parts` are of the
    present `fit`.
    """

    plan: Plan
    checkpoint: Path | None

    def __init__(self, config: RunConfig, end: RunEnd) -> None:
        self.config, self.end = config, end
        folder = end.folder / "checkpoints"
        self.checkpointing = Checkpointing.from_config(folder, config.callbacks)
        self.divergence = DivergenceGuard(config.callbacks, self.checkpointing.save)
        limit = config.trainer.max_time
        self.time_limit = TimeLimit(None if limit is None else run_length.seconds(limit))
        self.parts: Parts | None = None
        self._world_size, self._limit = 1, ""  # the key of the limit that gives the last step
        if (met := rendezvous.get_meeting()) is not None:
            collectives.record_flights(end.folder)
            met.watch(self._end_hanging)

    def prepare(self) -> None:
        """Find what the settings mean on this machine, and refuse what can be refused before the build."""
        typed = own_words.keys(self.end.words)
        device = devices.device(self.config)
        self._world_size = world_size = devices.devices(self.config, device) * self.config.trainer.num_nodes
        if device == "cuda" and (met := rendezvous.get_meeting()) is not None:
            met.claim(devices.take(met.ranks))
        before = self.config
        config = run_length.fit_micro_batch(before, world_size, typed)  # `trainer.devices=auto` is known only now
        for line in run_length.describe_micro_batch(before, config):
            log.info(line)
        check_batch(config, world_size)
        config, self._limit, epoch_ends = setup.resolve_length(config, typed)
        self.checkpointing.intervals.epoch_ends = frozenset(epoch_ends)
        self.checkpoint = setup.find_start(config, self.end.folder)
        self.config = config = setup.resolve_micro_batch(config, world_size, device, typed)
        self.plan = plan = resolve(config, device)
        if self.checkpoint is not None:
            self.plan = as_before(plan, config, read_plain(self.checkpoint, "precision"))
        if self.plan.ran != plan.ran:
            log.info("the run has fallen back to bf16, and stays there; another precision=NAME than %s ends that",
                     plan.asked)  # fmt: skip
        self.end.summary.take_settings(config)

    def fit_to_the_end(self, stop: GracefulStop) -> None:
        """Build and fit, again after each rollback, and validate the end."""
        config, checkpointing = self.config, self.checkpointing
        self.end.first_step = setup.saved_step(self.checkpoint) or 0
        self.log_line = LogLine(config, self.time_limit.left, self._best)
        while True:
            self.parts = self._build(stop)
            vocab_size, folder = self.parts.module.vocab_size, self.end.folder
            setup.announce(config, self.plan, vocab_size, self._world_size, folder, self.checkpoint)
            back = _fit(self.parts, self.checkpoint)
            if back is None:
                break
            self._go_back(back, self.parts)
        trainer, module = self.parts.trainer, self.parts.module
        finite = all(setup.is_finite(sharding.local(weight)) for weight in module.parameters())
        finite = trainer.strategy.reduce_boolean_decision(finite, all=True)
        self.divergence.policy.end(trainer.global_step, finite)
        validates = trainer.limit_val_batches != 0 and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if validates and checkpointing.tracker.validated_step != trainer.global_step:
            # The process before this one ended between the last step and its validation.
            trainer.validate(module, datamodule=self.parts.data, verbose=False)
        self.divergence.policy.judge_validation(trainer.global_step, self.last_val_loss())
        self.end.summary.ended_by = self._find_end(trainer)

    def _find_end(self, trainer: pl.Trainer) -> str | None:
        """Return the key of the limit that has ended the run; None if something else did."""
        stop = trainer.early_stopping_callback
        if isinstance(stop, EarlyStop) and stop.reached:  # it would end a longer run too
            return run_length.PATIENCE
        if trainer.global_step >= run_length.last_step(self.config):
            return self._limit
        return "trainer.max_time" if self.time_limit.reached else None

    def _build(self, stop: GracefulStop) -> Parts:
        """Build the parts of a run that continues from `checkpoint`, if there is one.

        The order of the callbacks counts: what decides whether a step is the last, and writes log lines, is first.
        Lightning moves what judges a step, saves and stops behind all others.
        """
        config, plan, folder = self.config, self.plan, self.end.folder
        pl.seed_everything(config.seed, workers=True, verbose=False)
        resume_step, trial = setup.saved_step(self.checkpoint), config.trainer.fast_dev_run
        data = TokenDataModule.from_config(config)
        module = GPT2Module(config, config.model.vocab_size or data.vocab_size)
        throughput = Throughput(config, module.vocab_size, self.divergence.policy)
        throughput.readers += [self.log_line.write, self.end.outdate]
        callbacks: list[Callback] = [self.time_limit, self.log_line, throughput]
        if config.callbacks.fp8_health and plan.recipe not in (None, "registered"):  # whose casts are not known
            write = FP8File(folder, resume_step).write if config.logger.csv and not trial else None
            callbacks.append(FP8HealthLog(config, write))
        if config.logger.histograms_every_n_steps and not trial:
            callbacks.append(Histograms(config.logger.histograms_every_n_steps, run_length.last_step(config)))
        kernels = plan.backend.kernels(module.vocab_size, config.micro_batch)
        callbacks.append(SameRun(config, read_versions() | _versions(plan), kernels, folder))
        callbacks += [*self._choose(throughput), RunLabels(config, self.end.words), self.divergence]
        callbacks += [] if trial else [self.checkpointing, stop]
        if config.trainer.profiler == "pytorch" and ranks.is_first_rank():
            callbacks.append(Profiler(folder))
        loggers = [] if trial else build_loggers(config, folder, resume_step, self.end.in_sweep)
        trainer = build_trainer(config, plan, folder, callbacks, loggers)
        return Parts(trainer, module, data, throughput)

    def _choose(self, throughput: Throughput) -> list[Callback]:
        """Return what follows validations, the bar and the user's own, as chosen; tell `throughput` what reads it."""
        config, options, callbacks = self.config, self.config.callbacks, list[Callback]()
        if options.early_stopping_patience is not None:
            callbacks.append(EarlyStop(options.early_stopping_patience, options.early_stopping_min_delta))
        if options.ranking is not None and not config.trainer.fast_dev_run:
            callbacks.append(Ranking(read_ranking(options.ranking, []), options.ranking_every_n_steps))
        if config.callbacks.red_flags:
            workers = {f"{source_key(name)}.num_workers": of.num_workers for name, of in sources_of(config.data)}
            watch = RunWatch(config.optim.warmup_steps, workers, partial(log.warning, "%s"))
            throughput.readers.append(rank_zero_only(watch.see))
        if config.callbacks.sample_tokens:
            callbacks.append(Samples(config.callbacks.sample_prompt, config.callbacks.sample_tokens, config.seed))
        extra = [registry.make("callbacks.extra", name, Callback, config) for name in config.callbacks.extra]
        if config.callbacks.progress_bar and not any(isinstance(callback, LightningBar) for callback in extra):
            callbacks.append(bar := ProgressBar(self.log_line.total, self.log_line.left))
            throughput.readers.append(bar.read)
        return callbacks + extra

    def _go_back(self, back: RollBack, parts: Parts) -> None:
        """Choose the plan and the checkpoint to continue with, the same on all ranks, and drop the parts."""
        parts.data.teardown()
        folder, saved = self.checkpointing.folder, self.checkpointing.writer.written
        path = setup.choose_rollback(back, folder, saved, self.checkpoint) if ranks.is_first_rank() else None
        self.checkpoint = parts.trainer.strategy.broadcast(path)
        self.divergence.start_again()
        detach_logging(parts.trainer)
        self.fill_summary()
        if back.step <= parts.module.step.attempts.steps_in_fp8:  # otherwise it was in bf16: FP8 is not at fault
            self.plan = fallen_back(self.plan, self.config, f"fallback at step {back.step}: {back.reason}")
        self.parts = None  # its memory is needed
        del parts
        clean_up()

    def _best(self) -> tuple[float, int] | None:
        best = self.checkpointing.tracker.best
        return None if best is None or best.val_loss is None else (best.val_loss, best.step)

    def last_val_loss(self) -> float | None:
        """Return the newest validation loss, or None if there was no validation."""
        loss = None if self.parts is None else self.parts.module.val_loss
        if loss is None:  # before this process
            loss = self.checkpointing.tracker.val_loss
        if loss is None and (last := pointers.read(self.checkpointing.folder, "last")):
            return last.val_loss
        return loss

    def close(self, error: BaseException | None) -> None:
        """Fill the summary, and end the data's workers: Lightning does not if `fit` raises."""
        if self.parts is not None:
            self.parts.data.say_documents()
            self.parts.data.teardown()
            with nullcontext() if error is None else suppress(Exception):  # a GPU that has failed does not answer
                self.fill_summary()

    def _end_hanging(self, lost: RunError) -> None:
        """Tell the end of a run whose main thread hangs in a collective."""
        self.fill_summary()
        self.end.close(lost)

    def fill_summary(self) -> None:
        """Write the results so far into the summary, at any moment, also after a failure."""
        if (parts := self.parts) is None:  # a thread reads it too
            return
        summary, trainer, throughput, best = (
            self.end.summary,
            parts.trainer,
            parts.throughput,
            self.checkpointing.tracker.best,
        )
        summary.precision |= {"ran": self.plan.ran, "reason": self.plan.reason}
        summary.recipe = self.plan.recipe
        summary.steps = trainer.global_step
        if (step := getattr(parts.module, "step", None)) is not None:
            summary.precision["last_in_bf16"] = step.attempts.last_in_bf16
            summary.kernels = self.plan.backend.kernels(parts.module.vocab_size, step.micro_batch_size)
        summary.tokens = trainer.global_step * throughput.tokens_per_step
        summary.last_train_loss, summary.last_val_loss = throughput.train_loss, self.last_val_loss()
        summary.tokens_per_second = throughput.median_rate
        summary.checkpoint_stall_seconds = self.checkpointing.longest_stall
        summary.divergence = self.divergence.policy.report()
        summary.skipped_steps = self.divergence.policy.skipped
        if best is not None:
            summary.best_val_loss, summary.best_val_loss_step = best.val_loss, best.step
            summary.checkpoint["best"] = str(self.checkpointing.folder / best.checkpoint)
        if last := pointers.read(self.checkpointing.folder, "last"):
            summary.checkpoint["last"] = str(self.checkpointing.folder / last.checkpoint)
        summary.data = parts.data.report()
        if self.plan.device == "cpu":
            summary.device, summary.peak_memory_gb = "cpu", devices.peak_host_gb()
        else:
            summary.versions |= library_versions()
            summary.device = torch.cuda.get_device_name()
            summary.training_memory_gb = throughput.training_gb = peak_gb(throughput.training_gb)
            summary.validation_memory_gb = throughput.validation_gb or summary.validation_memory_gb
            peaks = (summary.peak_memory_gb, summary.training_memory_gb, summary.validation_memory_gb)
            summary.peak_memory_gb = max(peak or 0.0 for peak in peaks)


def clean_up() -> None:
    """Free what ran before: the next run in the process may follow a rollback, or be a sweep's next job."""
    gc.collect()
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    transformer_engine.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _fit(parts: Parts, checkpoint: Path | None) -> RollBack | None:
    """Train to the end, or return the rollback that is needed."""
    try:
        parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=False)
    except RollBack as back:
        return back.with_traceback(None)  # the traceback holds the model
    finally:
        if isinstance(bar := parts.trainer.progress_bar_callback, ProgressBar):
            bar.stop()  # also if another callback fails before its turn
    return None


def _versions(plan: Plan) -> dict[str, str]:
    """Of what computes."""
    if plan.device == "cpu":
        return {"torch": torch.__version__}
    return {"torch": torch.__version__, "GPU": torch.cuda.get_device_name()} | library_versions()

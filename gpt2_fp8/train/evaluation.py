"""A trained model on a text and on endings: what `evaluate` finds out, through the run's own module and validation."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback, Timer, TQDMProgressBar
from lightning.pytorch.trainer.states import RunningStage

from gpt2_fp8.callbacks.throughput import peak_gb
from gpt2_fp8.checkpoint.files import read_plain
from gpt2_fp8.config import programs
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import Diverged
from gpt2_fp8.config.programs import EvaluateConfig
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.data.tokenizer import text_bytes
from gpt2_fp8.fp8.resolve import Plan, as_before, resolve
from gpt2_fp8.runtime import devices, registry
from gpt2_fp8.train.module import GPT2Module
from gpt2_fp8.train.precision_plugin import RunPrecision
from gpt2_fp8.train.ranking import count_right, encode, log_likelihoods
from gpt2_fp8.train.trained import Trained
from gpt2_fp8.train.trainer import quiet_logs


def evaluate(trained: Trained, config: RunConfig, own: EvaluateConfig) -> dict[str, Any]:
    """Validate the model as a run would, and rank endings if `own` names some; returns the results by their names.

    `config`: the checkpoint's with the command line on it. Raises Diverged for a loss that is not finite.
    """
    quiet_logs()
    warnings.filterwarnings("ignore", message=".*no logger configured")  # the module logs for a run
    registry.load(config.plugins, Path.cwd())
    device = devices.device(config)
    plan = as_before(resolve(config, device), config, read_plain(trained.path, "precision"))
    data = TokenDataModule.from_config(config)
    module = GPT2Module(config, vocabulary(trained.config), trained.weights, trained.step)
    items = [] if own.ranking is None else programs.read_ranking(own.ranking, [])
    endings = encode(data.tokenizer, items, config.model.n_positions)  # refuses what cannot be scored
    timer = Timer()
    trainer = _trainer(config, plan, [timer, LambdaCallback(on_validation_start=lambda *_: peak_gb(None, reset=True))])
    try:
        (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    except SystemExit as end:  # Lightning's answer to Ctrl-C
        if isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    found = {
        "checkpoint": str(trained.path),
        "weights": trained.of,
        "data": config.data.name,
        "precision": plan.ran,
        "evaluation": "bf16" if plan.evaluates_in_bf16 else plan.ran,
        "recipe": plan.recipe,
        "asked": plan.asked,
        "reason": plan.reason,
        "kernels": plan.evaluation_kernels(module.vocab_size),
        **_losses(data, metrics),
    }
    on_gpu, seconds = device == "cuda", timer.time_elapsed(RunningStage.VALIDATING)
    found |= {
        "seconds": seconds,
        "tokens_per_second": found["tokens"] / seconds,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "peak_memory_gb": peak_gb(None) if on_gpu else devices.peak_host_gb(),  # of a CPU's whole process
    }
    if own.ranking is not None:
        module.to(device)  # where a Trainer does not leave it
        found["ranking"] = count_right(items, log_likelihoods(module, endings, config.micro_batch))
    return found


def _trainer(config: RunConfig, plan: Plan, callbacks: list[pl.Callback]) -> pl.Trainer:
    bar = [TQDMProgressBar()] if sys.stderr.isatty() else []
    return pl.Trainer(
        accelerator=plan.device,
        devices=1,
        plugins=[RunPrecision(plan)],
        callbacks=[*callbacks, *bar],
        logger=False,
        deterministic=config.trainer.deterministic,
        enable_checkpointing=False,
        enable_progress_bar=bool(bar),
        enable_model_summary=False,
        inference_mode=False,  # as in a run
        use_distributed_sampler=False,
    )


def _losses(data: TokenDataModule, metrics: Any) -> dict[str, Any]:
    """Return the loss and what follows from it and the text. Loss: nats a token, over all tokens that were scored.

    Bits per byte are over the bytes of the tokens' text. An id that ends a document is scored, and has no bytes.
    """
    assert data.text is not None
    loss, tokenizer = float(metrics["val_loss"]), data.tokenizer
    if not math.isfinite(loss):
        raise Diverged(f"the loss on this text is {loss}; an earlier checkpoint may have one, or precision=fp32")
    targets = [blocks[:, 1:] for blocks in data.text.val.values()]
    tokens = sum(ids.size for ids in targets)
    size = sum(text_bytes(tokenizer, ids[ids != tokenizer.eot_token].tolist()) for ids in targets)
    named = {name.partition("/")[2]: float(value) for name, value in metrics.items() if name.startswith("val_loss/")}
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss * tokens / math.log(2) / size if size else None,
        "tokens": tokens,
        "bytes": size,
        "sequences": sum(len(ids) for ids in targets),
        **({"sources": named} if named else {}),
    }

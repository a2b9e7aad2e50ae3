"""A trained model on a text and on endings: what `evaluate` finds out, through the run's own module and validation."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback, Timer, TQDMProgressBar
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gpt2_fp8.callbacks.throughput import peak_gb
from gpt2_fp8.checkpoint.files import read_plain
from gpt2_fp8.config import programs
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import Diverged, Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.programs import EvaluateConfig, Item
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.data.tokenizer import Tokenizer, text_bytes
from gpt2_fp8.data.workers import ProgressLog
from gpt2_fp8.engine.out_of_memory import is_out_of_memory
from gpt2_fp8.fp8.resolve import Plan, as_before, resolve
from gpt2_fp8.runtime import devices, registry
from gpt2_fp8.train.module import GPT2Module
from gpt2_fp8.train.precision_plugin import RunPrecision
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
        items = programs.read_ranking(own.ranking, [])
        found["ranking"] = rank(module, data.tokenizer, items, config.model.n_positions, config.micro_batch)
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


class Row(NamedTuple):
    """The ids of a beginning with an ending, and how many of the last ones are the ending's."""

    ids: list[int]
    scored: int


def encode_pair(tokenizer: Tokenizer, context: str, ending: str) -> Row:
    """Encode a beginning and an ending as lm-eval does.

    The two are encoded together; what comes after as many tokens as the beginning has alone is the ending's. Blanks at
    the beginning's end belong to the ending. An empty beginning is the token that ends a document.
    """
    kept = context.rstrip()
    context, ending = kept, f"{context[len(kept) :]} {ending}"
    if not context:
        ids = tokenizer.encode_ordinary(ending)
        return Row([tokenizer.eot_token, *ids], len(ids))
    whole = tokenizer.encode_ordinary(context + ending)
    return Row(whole, len(whole) - len(tokenizer.encode_ordinary(context)))


def rank(
    logits_of: Callable[[Tensor], Tensor], tokenizer: Tokenizer, items: list[Item], n_positions: int, rows: int
) -> dict[str, float | int]:
    """Rank the endings of each item by their log-likelihoods, as lm-eval asks HellaSwag's questions.

    Returns the accuracy of the largest sum (`acc`) and of the largest sum divided by the ending's characters
    (`acc_norm`), each with its standard error, and the number of items. `logits_of` computes [rows, tokens, vocabulary]
    of ids [rows, tokens]. Of a text longer than `n_positions`, the last tokens count.
    """
    encoded = [[encode_pair(tokenizer, item.context, ending) for ending in item.endings] for item in items]
    if problems := list(_unscorable(items, encoded, n_positions)):
        raise UserError(problems)
    flat = [Row(row.ids[-(n_positions + 1) :], row.scored) for of_item in encoded for row in of_item]
    sums = iter(log_likelihoods(logits_of, flat, rows))
    right = {"acc": 0, "acc_norm": 0}
    for item in items:
        own = [next(sums) for _ in item.endings]
        normed = [value / len(ending) for value, ending in zip(own, item.endings, strict=True)]
        right["acc"] += own.index(max(own)) == item.label
        right["acc_norm"] += normed.index(max(normed)) == item.label
    found: dict[str, float | int] = {"items": len(items)}
    for name, count in right.items():
        part = count / len(items)
        found |= {name: part, f"{name}_stderr": math.sqrt(part * (1 - part) / max(1, len(items) - 1))}
    return found


def log_likelihoods(logits_of: Callable[[Tensor], Tensor], flat: list[Row], rows: int) -> list[float]:
    """Return the log-likelihood of the scored ids of each row, nats. Rows of like length are computed together."""
    order = sorted(range(len(flat)), key=lambda place: -len(flat[place].ids))  # the largest first: does it fit?
    found, done, looking = [0.0] * len(flat), 0, ProgressLog("ranking endings", len(flat))
    while done < len(order):
        looking.at(done)
        batch = order[done : done + rows]
        try:
            sums = _of_batch(logits_of, [flat[place] for place in batch])
        except Exception as error:
            if rows == 1 or not is_out_of_memory(error):
                raise
            rows = max(1, rows // 2)
            continue
        for place, value in zip(batch, sums, strict=True):
            found[place] = value
        done += len(batch)
    return found


def _of_batch(logits_of: Callable[[Tensor], Tensor], batch: list[Row]) -> list[float]:
    ids = pad_sequence([torch.tensor(row.ids) for row in batch], batch_first=True)  # a causal model sees no padding
    logits, sums = logits_of(ids[:, :-1]), []
    for row, own, targets in zip(batch, logits, ids.to(logits.device), strict=True):
        last = len(row.ids)
        chosen = targets[last - row.scored : last, None]
        likelihoods = own[last - 1 - row.scored : last - 1].float().log_softmax(-1).gather(1, chosen)
        sums.append(likelihoods.double().sum())
    return [float(value) for value in torch.stack(sums).tolist()]


def _unscorable(items: list[Item], encoded: list[list[Row]], n_positions: int) -> Iterator[Problem]:
    for number, (item, rows) in enumerate(zip(items, encoded, strict=True), 1):
        for ending, row in zip(item.endings, rows, strict=True):
            named = f"ranking, item {number}, ending {show(ending)}"
            if row.scored < 1:
                yield Problem(f"{named} has no token of its own", "leave the item out")
            elif row.scored > n_positions:
                cause = f"{named} has {row.scored:,} tokens, and the model {n_positions:,} positions"
                yield Problem(cause, "leave the item out, or shorten the ending")

"""Endings ranked by their log-likelihoods, as lm-eval asks HellaSwag's questions: of a trained model, and of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gpt2_fp8.compat import lightning_private as loops
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.programs import Item
from gpt2_fp8.config.shown import format_count
from gpt2_fp8.data.tokenizer import Tokenizer
from gpt2_fp8.data.workers import ProgressLog
from gpt2_fp8.engine.out_of_memory import check_undivided, is_out_of_memory
from gpt2_fp8.runtime import collectives, signals
from gpt2_fp8.runtime.sharding import is_divided

log = logging.getLogger(__name__)

_ACCURACIES = "acc", "acc_norm"


class Ranking(pl.Callback):
    """Ranks endings after validations, and gives the loggers `ranking/acc` and `ranking/acc_norm`.

    The ranks share the endings, and compute with the weights and in the precision of validations.

    Args:
        items: the beginnings and their endings.
        every_n_steps: which validations are followed by it, and the last is; 0: each.
    """

    def __init__(self, items: list[Item], every_n_steps: int) -> None:
        self._items, self._every_n_steps = items, every_n_steps
        self._rows: list[Row] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Encode the endings. Raises UserError for those that cannot be scored."""
        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        self._rows = encode(tokenizer, self._items, pl_module.config.model.n_positions, "callbacks.ranking")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Rank them, if it is time, and log how many are right. Collective."""
        step, every = trainer.global_step, self._every_n_steps
        if trainer.sanity_checking or (every and step % every and not loops.is_last_step(trainer)):
            return
        if (sums := self._log_likelihoods(pl_module)) is None:
            return
        found = count_right(self._items, sums)
        for logger in trainer.loggers:
            logger.log_metrics({f"ranking/{name}": found[name] for name in _ACCURACIES}, step=step)
        if trainer.is_global_zero:
            shown = [f"{name} {found[name]:.4f} ± {found[name + '_stderr']:.4f}" for name in _ACCURACIES]
            log.info("ranking at step %d: %s of %s", step, "  ".join(shown), format_count(len(self._items), "item"))

    def _log_likelihoods(self, pl_module: Any) -> list[float] | None:
        """Return the log-likelihood of each ending; None, with a line in the log, if a rank has none. Collective."""
        rank, ranks = collectives.rank_and_world()
        share = -(-len(self._rows) // ranks)  # a forward of a divided model is collective: as many on each rank
        own = [self._rows[min(place * ranks + rank, len(self._rows) - 1)] for place in range(share)]

        rows, sums = pl_module.step.micro_batch_size, list[float]()
        try:  # of a divided model no rank may take fewer alone: the others would be in another forward
            sums = log_likelihoods(pl_module, own, rows, least=rows if is_divided(pl_module.model) else 1)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            check_undivided(pl_module.model, "a ranking", "callbacks.ranking=null")
        told = collectives.everyones(sums)
        if not all(told):
            log.warning("no ranking: out of memory")
            return None
        return [told[place % ranks][place // ranks] for place in range(len(self._rows))]


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


def encode(tokenizer: Tokenizer, items: list[Item], n_positions: int, key: str = "ranking") -> list[Row]:
    """Encode the endings of each item. Of a text longer than `n_positions`, the last tokens count.

    Raises UserError for endings without a token, or with more than `n_positions`. `key` names their file.
    """
    encoded = [[encode_pair(tokenizer, item.context, ending) for ending in item.endings] for item in items]
    if problems := list(_unscorable(items, encoded, n_positions, key)):
        raise UserError(problems)
    return [Row(row.ids[-(n_positions + 1) :], row.scored) for of_item in encoded for row in of_item]


def count_right(items: list[Item], log_likelihoods: list[float]) -> dict[str, float | int]:
    """Count the items whose right ending is the likeliest.

    Returns the accuracy of the largest sum (`acc`) and of the largest sum divided by the ending's characters
    (`acc_norm`), each with its standard error, and the number of items.
    """
    sums, right = iter(log_likelihoods), dict.fromkeys(_ACCURACIES, 0)
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


def log_likelihoods(logits_of: Callable[[Tensor], Tensor], flat: list[Row], rows: int, least: int = 1) -> list[float]:
    """Return the log-likelihood of the scored ids of each row, nats. Rows of like length are computed together.

    `logits_of` computes [rows, tokens, vocabulary] of ids [rows, tokens], of so many `rows` at once, or of what fits,
    but not fewer than `least`. In a single process, a signal ends it between two of its forwards.
    """
    order = sorted(range(len(flat)), key=lambda place: -len(flat[place].ids))  # the largest first: does it fit?
    found, done, looking = [0.0] * len(flat), 0, ProgressLog("ranking endings", len(flat))
    while done < len(order):
        signals.look()
        looking.at(done)
        batch = order[done : done + rows]
        try:
            sums = _of_batch(logits_of, [flat[place] for place in batch])
        except Exception as error:
            if rows <= least or not is_out_of_memory(error):
                raise
            rows //= 2
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


def _unscorable(items: list[Item], encoded: list[list[Row]], n_positions: int, key: str) -> Iterator[Problem]:
    for number, (item, rows) in enumerate(zip(items, encoded, strict=True), 1):
        for ending, row in zip(item.endings, rows, strict=True):
            named = f"{key}, item {number}, ending {show(ending)}"
            if row.scored < 1:
                yield Problem(f"{named} has no token of its own", "leave the item out")
            elif row.scored > n_positions:
                cause = f"{named} has {row.scored:,} tokens, and the model {n_positions:,} positions"
                yield Problem(cause, "leave the item out, or shorten the ending")

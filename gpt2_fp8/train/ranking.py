"""Which of several endings a model finds likeliest, as lm-eval asks HellaSwag's questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.programs import Item
from gpt2_fp8.data.tokenizer import Tokenizer
from gpt2_fp8.data.workers import ProgressLog
from gpt2_fp8.engine.out_of_memory import is_out_of_memory


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
    """Rank the endings of each item by their log-likelihoods.

    Returns the accuracy of the largest sum (`acc`) and of the largest sum divided by the ending's characters
    (`acc_norm`), each with its standard error, and the number of items.

    Args:
        logits_of: computes logits [rows, tokens, vocabulary] of ids [rows, tokens].
        n_positions: of a longer text, the last tokens count.
        rows: sequences that are computed together.

    Raises UserError for endings without a token of their own, or with more than the model has positions.
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

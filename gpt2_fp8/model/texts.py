"""Texts that go on together, each with random numbers of its own: none depends on those beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gpt2_fp8.model.decoder import Decoder
from gpt2_fp8.model.sampling import Sampling, candidates, draw

End = Literal["end of text", "tokens", "not finite"]


@dataclass
class Text:
    """One text.

    Attributes:
        prompt: its first ids, at least one.
        seed: of its random numbers.
        most: how many ids are drawn at most.
        ids: what was drawn so far, without the id that ended it.
        ended: why it ended: by the end of a document, by its number of tokens, or because logits were not finite.
    """

    prompt: list[int]
    seed: int
    most: int
    ids: list[int] = field(default_factory=list)
    ended: End | None = None


def go_on(decoder: Decoder, texts: list[Text], sampling: Sampling, vocab_size: int, end: int | None) -> Iterator[None]:
    """Draw ids for texts, one for each a turn, until all have ended; yields after each turn.

    `end`: the id that ends a text; None: nothing does. Ids from `vocab_size` on, which pad the vocabulary, are never
    drawn. They are drawn on the CPU, and no global random state changes.
    """
    generators = [torch.Generator().manual_seed(text.seed) for text in texts]
    logits = decoder.begin([text.prompt for text in texts])
    while True:
        drawn = _draw(logits[:, :vocab_size], sampling, generators, [text.ended is None for text in texts])
        for text, new in zip(texts, drawn, strict=True):
            _add(text, new, end)
        yield
        if all(text.ended for text in texts):
            return
        logits = decoder.step([None if text.ended else text.ids[-1] for text in texts])


def _add(text: Text, new: int | None, end: int | None) -> None:
    """Add an id to a text that has not ended; None: its logits were not finite."""
    if text.ended:
        return
    if new is None:
        text.ended = "not finite"
    elif new == end:
        text.ended = "end of text"
    else:
        text.ids.append(new)
        if len(text.ids) >= text.most:
            text.ended = "tokens"


def _draw(
    logits: Tensor, sampling: Sampling, generators: list[torch.Generator], wanted: list[bool]
) -> list[int | None]:
    """Draw an id for each row that is wanted; None for the others, and where logits are not finite."""
    ids, weights = candidates(logits.float(), sampling)
    finite = torch.isfinite(logits).all(-1)
    found, ids, weights = finite.tolist(), ids.cpu(), weights.cpu()
    return [
        draw(ids[row], weights[row], generator) if wanted[row] and found[row] else None
        for row, generator in enumerate(generators)
    ]

"""Text from a model: ids drawn by temperature, top-k and top-p (nucleus sampling, Holtzman et al. 2020).

`generate` continues one prompt with a model in training, without a cache. `go_on` continues several texts together,
each with random numbers of its own: none depends on those beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from gpt2_fp8.model.decoder import Decoder

TOP_K = 50  # of `generate`
End = Literal["end of text", "tokens", "not finite"]


@dataclass(frozen=True)
class Sampling:
    """How an id is drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest id.
        top_k: only so many of the likeliest ids are drawn from; None: all.
        top_p: of these, only the fewest likeliest ones whose probabilities sum to at least `top_p`.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the ids that may follow and their weights, both [rows, n], the likeliest first if any are left out.

    logits: [rows, vocabulary], finite. The weights of a row are in proportion to the probabilities; those of ids that
    `top_p` leaves out are 0.
    """
    if sampling.temperature == 0:
        ids = logits.argmax(-1, keepdim=True)
        return ids, torch.ones_like(ids, dtype=logits.dtype)
    if sampling.temperature != 1:
        logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # a tiny one must not overflow
    count = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    if count < logits.shape[-1]:
        logits, ids = torch.topk(logits, count)
    elif sampling.top_p < 1:
        logits, ids = torch.sort(logits, descending=True)
    else:
        ids = torch.arange(count, device=logits.device).expand_as(logits)
    weights = logits.softmax(-1)
    if sampling.top_p < 1:
        likelier = weights.cumsum(-1) - weights  # the sum of those before; of the first it is 0
        weights = weights.masked_fill(likelier >= sampling.top_p, 0.0)
    return ids, weights


def draw(ids: Tensor, weights: Tensor, generator: torch.Generator) -> int:
    """Draw one of `ids`, [n], in proportion to `weights`, [n], on the CPU; the global random state is left alone."""
    if len(ids) == 1:
        return int(ids[0])
    return int(ids[torch.multinomial(weights, 1, generator=generator)])


def generate(
    model: nn.Module,
    prompt: list[int],
    tokens: int,
    vocab_size: int,
    n_positions: int,
    seed: int,
    stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Draw `tokens` ids after `prompt` (at least one id), at temperature 1, among the `TOP_K` most likely.

    Call it in evaluation mode. The context is a fixed window of `n_positions`, filled with 0 after the last token: a
    shape that FP8 supports. Ids are drawn on the CPU from `seed`; no global random state changes. It returns early if
    `stopped()`, or if logits are not finite. Raises ValueError for a prompt id outside the vocabulary.
    """
    assert prompt, "a prompt has at least one token"
    if odd := [i for i in prompt if not 0 <= i < vocab_size]:
        raise ValueError(f"the prompt has the id {odd[0]} of a vocabulary of {vocab_size:,}")
    device, ids = next(model.parameters()).device, list(prompt)
    generator, sampling = torch.Generator().manual_seed(seed), Sampling(top_k=TOP_K)
    for _ in range(tokens):
        if stopped():
            break
        context = ids[-n_positions:]
        window = nn.functional.pad(torch.tensor(context), (0, n_positions - len(context)))
        logits = model(window[None].to(device))[0, len(context) - 1, :vocab_size].float().cpu()
        if not torch.isfinite(logits).all():
            break
        likeliest, weights = candidates(logits[None], sampling)
        ids.append(draw(likeliest[0], weights[0], generator))
    return ids[len(prompt) :]


def decode_after(decode: Callable[[list[int]], str], prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of `ids` after `prompt`, decoded together: some tokenizers drop a text's first blank."""
    return decode([*prompt, *ids])[len(decode([*prompt])) :]


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

    def add(self, new: int | None, end: int | None) -> None:
        """Add an id, unless the text has ended; None: its logits were not finite. `end`: the id that ends it."""
        if self.ended:
            return
        if new is None:
            self.ended = "not finite"
        elif new == end:
            self.ended = "end of text"
        else:
            self.ids.append(new)
            if len(self.ids) >= self.most:
                self.ended = "tokens"


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
            text.add(new, end)
        yield
        if all(text.ended for text in texts):
            return
        logits = decoder.step([None if text.ended else text.ids[-1] for text in texts])


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

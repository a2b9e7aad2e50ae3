"""Text from a model in training, without a cache: one token after another, each drawn from the most likely ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from gpt2_fp8.model.sampling import Sampling, candidates, draw

TOP_K = 50


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

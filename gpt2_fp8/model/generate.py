"""Text from a model in training, without a cache: one token after another, each drawn from the most likely ones."""

from __future__ import annotations

from collections.abc import Callable

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

    Call it in evaluation mode. The context is a fixed window of `n_positions`, so that every forward has a shape that
    FP8 supports. Positions after the last token are filled with 0: a causal model does not see them.

    Ids are drawn on the CPU from `seed`; no global random state changes. It returns early if `stopped()`, or if logits
    are not finite, as those of a diverged model. Raises ValueError for a prompt id outside the vocabulary: a GPU would
    read beyond its table.
    """
    assert prompt, "a prompt has at least one token"
    if odd := [i for i in prompt if not 0 <= i < vocab_size]:
        raise ValueError(f"the prompt has the id {odd[0]} of a vocabulary of {vocab_size:,}")
    device = next(model.parameters()).device
    generator, sampling = torch.Generator().manual_seed(seed), Sampling(top_k=TOP_K)
    ids = list(prompt)
    for _ in range(tokens):
        if stopped():
            break
        context = ids[-n_positions:]
        window = torch.zeros(1, n_positions, dtype=torch.long)
        window[0, : len(context)] = torch.tensor(context)
        logits = model(window.to(device))[0, len(context) - 1, :vocab_size].float().cpu()
        if not torch.isfinite(logits).all():
            break
        likeliest, weights = candidates(logits[None], sampling)
        ids.append(draw(likeliest[0], weights[0], generator))
    return ids[len(prompt) :]

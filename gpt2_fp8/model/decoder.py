"""A model that computes one token after another: keys and values of earlier tokens are kept, not computed again.

It is for the plain-torch layers (`layers.block.Block`). Rows may have different lengths: each has its own positions.
What lies in the cache behind a row's last token is never seen, and the row's next token overwrites it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_fp8.config.block_spec import RoPE
from gpt2_fp8.layers.reference import angles
from gpt2_fp8.layers.sdpa import within_documents
from gpt2_fp8.model.gpt2 import GPT2


class Decoder:
    """Keys and values of `rows` texts, preallocated, and the model that goes on with them.

    Args:
        model: in evaluation mode, of plain-torch layers, on the device and in the dtype to compute in.
        rows: texts that are computed together.
        capacity: tokens of the longest, at most `n_positions`. A text that outgrows it goes on with its newest half,
            which is computed again from position 0.

    Attributes: `contexts`, the ids of each row that are in the cache.
    """

    def __init__(self, model: GPT2, rows: int, capacity: int):
        heads, weight = model.spec.heads, model.tokens.weight
        assert 1 <= capacity <= model.config.n_positions
        self.model, self.capacity, self.device = model, capacity, weight.device
        self._blocks: Any = model.blocks
        shape = (model.config.n_layer, rows, heads.n_kv_head, capacity, heads.size)
        self._keys, self._values = (torch.zeros(shape, dtype=weight.dtype, device=self.device) for _ in range(2))
        rope = model.spec.positions
        self._angles = angles(rope, heads.size, capacity, self.device) if isinstance(rope, RoPE) else None
        self._starts = torch.zeros(rows, dtype=torch.long, device=self.device)  # of the documents, with a mask
        self.contexts: list[list[int]] = [[] for _ in range(rows)]

    @torch.no_grad()
    def begin(self, prompts: list[list[int]]) -> Tensor:
        """Compute all prompts in one pass; returns the logits of what follows each, [rows, padded vocabulary].

        Of a prompt that is longer than the capacity, the last tokens count.
        """
        assert len(prompts) == len(self.contexts)
        self.contexts = [prompt[-self.capacity :] for prompt in prompts]
        return self._fill(list(range(len(prompts))))

    @torch.no_grad()
    def step(self, ids: list[int | None]) -> Tensor:
        """Compute one more token of each row; returns the logits of what follows, as `begin`.

        A row whose id is None has ended. Its logits mean nothing.
        """
        full, places = [], []
        for row, (context, new) in enumerate(zip(self.contexts, ids, strict=True)):
            places.append(min(len(context), self.capacity - 1))
            if new is not None and len(context) == self.capacity:
                self.contexts[row] = [*context, new][-max(1, self.capacity // 2) :]
                full.append(row)
            elif new is not None:
                context.append(new)
        if len(full) == len(ids):
            return self._fill(full)
        logits = self._next([0 if new is None else new for new in ids], places)
        if full:
            logits[torch.tensor(full, device=self.device)] = self._fill(full)
        return logits

    def _fill(self, rows: list[int]) -> Tensor:
        """Compute the whole contexts of some rows, padded to the longest: a causal model does not see what follows."""
        model, contexts = self.model, [self.contexts[row] for row in rows]
        lengths = torch.tensor([len(context) for context in contexts], device=self.device)
        longest = max(map(len, contexts))
        padded = [context + [0] * (longest - len(context)) for context in contexts]
        ids = torch.tensor(padded, dtype=torch.long, device=self.device)
        into = torch.tensor(rows, device=self.device)
        angle = None if self._angles is None else self._angles[:longest]
        x, mask = model.embed(ids), None
        if model.separator is not None:
            mask = within_documents(ids, model.separator, x.dtype, model.separator_begins)
            place = torch.arange(longest, device=self.device)
            borders = (ids == model.separator) & (place < lengths[:, None])
            self._starts[into] = ((place + (not model.separator_begins)) * borders).amax(1)
        for i, block in enumerate(self._blocks):
            q, k, v = block.attention.prepare(block.qkv(x), angle)
            self._keys[i, into, :, :longest], self._values[i, into, :, :longest] = k.transpose(1, 2), v.transpose(1, 2)
            x = block.after_attention(x, block.attention.attend(q, k, v, mask))
        last = x[torch.arange(len(rows), device=self.device), lengths - 1]
        return cast(Tensor, model.head(last))

    def _next(self, new: list[int], at: list[int]) -> Tensor:
        """Compute one token of each row, at the position `at` of its row."""
        model, rows = self.model, len(new)
        ids, places = torch.tensor([new, at], device=self.device)
        seen, mask = max(at) + 1, self._mask(ids, places, at)
        # Rows take the place of tokens: each has a position of its own, and layers treat tokens one by one.
        angle = None if self._angles is None else self._angles[places]
        x = F.embedding(ids, model.tokens.weight)
        x = x if model.positions is None else x + model.positions.weight[places]
        every = torch.arange(rows, device=self.device)
        for i, block in enumerate(self._blocks):
            q, k, v = block.attention.prepare(block.qkv(x)[None], angle)
            keys, values = self._keys[i], self._values[i]
            if mask is None:
                keys[:, :, seen - 1], values[:, :, seen - 1] = k[0], v[0]
            else:
                keys[every, :, places], values[every, :, places] = k[0], v[0]
            y = F.scaled_dot_product_attention(
                q[0][:, :, None], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask,
                enable_gqa=q.shape[2] != k.shape[2],
            )  # fmt: skip
            x = block.after_attention(x, y.flatten(1))
        return cast(Tensor, model.head(x))

    def _mask(self, ids: Tensor, places: Tensor, at: list[int]) -> Tensor | None:
        """Return which keys each row sees, [rows, 1, 1, keys]; None if each sees all of them."""
        separator = self.model.separator
        if separator is None and min(at) == max(at):
            return None
        keys = torch.arange(max(at) + 1, device=self.device)
        mask = keys <= places[:, None]
        if separator is not None:
            begins = self.model.separator_begins
            starts = torch.where(ids == separator, places + (not begins), self._starts)
            mask &= keys >= (starts if begins else self._starts)[:, None]
            self._starts = starts
        return mask[:, None, None]

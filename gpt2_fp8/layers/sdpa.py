"""Causal attention by torch's `scaled_dot_product_attention`: its kernels, and the mask that keeps it within documents.

A document ends with its separator, or begins with it, and packing cuts the text anywhere. So a sequence begins in the
middle of a document, and each separator is a border. Positions go on from one document to the next.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2_fp8.compat.torch_private import chosen_attention
from gpt2_fp8.config.block_spec import Heads
from gpt2_fp8.config.schema import AttentionKernel

HELD: dict[AttentionKernel, SDPBackend] = {
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
WORDS = {
    SDPBackend.MATH: "unfused",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}


def causal(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, kernel: AttentionKernel = "auto", mask: Tensor | None = None
) -> Tensor:
    """Compute causal attention over [batch, tokens, heads, size]; returns [batch, tokens, heads * size].

    Keys and values may have fewer heads than queries. A `kernel` of `HELD` alone may compute it: torch raises
    RuntimeError where that cannot. Of any other, torch chooses. `mask`: what is added to the scores, [batch, 1, tokens,
    tokens], causal by itself; only for "math" and the kernels that torch chooses.
    """
    shared = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert mask is None or kernel == "math" or kernel not in HELD, "refused by the check of the settings"
    with sdpa_kernel(HELD[kernel]) if kernel in HELD else nullcontext():
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=shared
        )
    return y.transpose(1, 2).flatten(2)


def why_not(kernel: AttentionKernel, heads: Heads, tokens: int, dropout: float) -> str | None:
    """Return why a kernel of `HELD` cannot compute training in bfloat16 on this GPU, in torch's words; None if it can.

    It allocates the queries, keys and values of one sequence.
    """
    if kernel == "math":
        return None
    parameters = SDPAParams(*_one(heads, tokens, torch.bfloat16, "cuda"), None, dropout, True, _shared(heads))
    can_use = can_use_cudnn_attention if kernel == "cudnn" else can_use_flash_attention
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if can_use(parameters, debug=True):
            return None
    return str(said[0].message).partition("(Triggered")[0].strip().rstrip(".") if said else "torch cannot use it here"


def kernels(
    kernel: AttentionKernel, heads: Heads, tokens: int, dropout: float, dtype: torch.dtype, device: str,
    masked: bool = False,
) -> str:  # fmt: skip
    """Name for people the kernel that `causal` runs in training. `masked`: with a mask."""
    if kernel in HELD:
        return f"torch's {WORDS[HELD[kernel]]} kernel, as asked"
    mask = torch.zeros(1, 1, 1, tokens, dtype=dtype, device=device).expand(-1, -1, tokens, -1) if masked else None
    found = chosen_attention(*_one(heads, tokens, dtype, device), dropout, _shared(heads), mask)
    return f"torch's {WORDS.get(SDPBackend(found), 'own')} kernel"


def _shared(heads: Heads) -> bool:
    return heads.n_head != heads.n_kv_head


def _one(heads: Heads, tokens: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate queries, keys and values of one sequence, as a layer splits them: [1, heads of each, tokens, size]."""
    numbers = heads.n_head, heads.n_kv_head, heads.n_kv_head
    packed = torch.empty(1, tokens, sum(numbers), heads.size, dtype=dtype, device=device, requires_grad=True)
    q, k, v = (part.transpose(1, 2) for part in packed.split(numbers, dim=2))
    return q, k, v


def within_documents(ids: Tensor, separator: int, dtype: torch.dtype, begins: bool = False) -> Tensor:
    """Compute what is added to attention's scores: 0 for earlier tokens of the same document, else minus infinity.

    ids: integers [batch, tokens]. `begins`: whether the separator is a document's first token, not its last. Returns
    [batch, 1, tokens, tokens]. Its shape does not depend on the ids, and the host waits for nothing. It is made once
    for all layers, in the `dtype` of queries: torch would convert it in each.
    """
    borders = ids == separator
    document = borders.cumsum(1)  # of each token
    if not begins:
        document = document - borders.long()  # a separator belongs to the document that it ends
    same = (document[:, :, None] == document[:, None, :]).tril()
    mask = torch.full(same.shape, -torch.inf, dtype=dtype, device=ids.device)
    return mask.masked_fill(same, 0.0)[:, None]

"""The mask that keeps attention within documents (`document_mask`), from the ids alone.

A document ends with its separator, or begins with it, and packing cuts the text anywhere. So a sequence begins in the
middle of a document, and each separator is a border. Positions go on from one document to the next.
"""

from __future__ import annotations

import torch
from torch import Tensor


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

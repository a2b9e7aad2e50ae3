"""The mask that keeps attention within documents (`document_mask`), from the ids alone.

A document ends with its separator, and packing cuts the text anywhere. So a sequence begins in the middle of a
document, and after each separator another one begins. Positions go on from one document to the next.
"""

from __future__ import annotations

import torch
from torch import Tensor


def within_documents(ids: Tensor, separator: int, dtype: torch.dtype) -> Tensor:
    """Compute what is added to attention's scores: 0 for earlier tokens of the same document, else minus infinity.

    ids: integers [batch, tokens]. Returns [batch, 1, tokens, tokens]. Its shape does not depend on the ids, and the
    host waits for nothing. It is made once for all layers, in the `dtype` of queries: torch would convert it in each.
    """
    ends = ids == separator
    document = ends.cumsum(1) - ends.long()  # of each token; a separator belongs to the document that it ends
    same = (document[:, :, None] == document[:, None, :]).tril()
    mask = torch.full(same.shape, -torch.inf, dtype=dtype, device=ids.device)
    return mask.masked_fill(same, 0.0)[:, None]

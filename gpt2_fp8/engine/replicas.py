"""Whether the ranks of a data-parallel run still train the same weights. Plain torch."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gpt2_fp8.config.errors import Drifted
from gpt2_fp8.runtime import collectives
from gpt2_fp8.runtime.sharding import is_divided

_SHOWN = 8  # ranks in a message


def check_replicas(model: nn.Module, step: int, average: Iterable[Tensor] = ()) -> None:
    """Raise Drifted, the same on all ranks, if any of them has other weights than the others after `step`. Collective.

    So it does for another `average` of them.

    A flipped bit, or a kernel that computes other numbers, leaves a finite loss. The optimizer's moments are not read:
    where they differ, the weights do after the next update. A model that FSDP2 has divided is not looked at.
    """
    if not collectives.is_distributed() or is_divided(model):
        return
    found = collectives.everyones((checksum([*model.parameters(), *average]), socket.gethostname()))
    sums = [own for own, _ in found]
    common = Counter(sums).most_common(1)[0][0]  # rank 0's, if as many ranks have another
    if different := [f"{rank} (on {host})" for rank, (own, host) in enumerate(found) if own != common]:
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        ranks = f"rank{'s' * (len(different) > 1)} {', '.join(different[:_SHOWN])}{more}"
        raise Drifted(
            f"the weights of {ranks} differ from those of rank {sums.index(common)} after step {step}, which is not "
            "saved: a GPU or its memory may be faulty"
        )


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a 64-bit sum over the bits of float32 tensors, of their rows each by its place. Waits for the device.

    Sums of integers wrap, so they are exact and do not depend on their order. A row is summed in 32 bits, without a
    copy of the tensor in 64: on a GPU it is one read of the weights and a kernel for each matrix.
    """
    rows = []
    for tensor in tensors:
        bits = tensor.detach().view(torch.int32)
        rows.append(bits.sum(-1, dtype=torch.int32).flatten() if bits.dim() > 1 else bits.flatten())
    sums = torch.cat(rows).long()
    places = torch.arange(1, 2 * len(sums), 2, device=sums.device)
    return int((sums * places).sum())

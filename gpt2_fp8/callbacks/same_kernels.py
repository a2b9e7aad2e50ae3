"""Refuses ranks that compute with different kernels.

Each kernel rounds in its own way, and the slowest rank keeps all others waiting in every step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gpt2_fp8.config.errors import SharedRefusal
from gpt2_fp8.runtime import collectives


class SameKernels(Callback):
    """Compares once what this rank computes with (names and words, such as versions) with rank 0's."""

    def __init__(self, computes_by: Mapping[str, str]):
        self.computes_by = dict(computes_by)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Compare before anything is computed. Collective. Raises SharedRefusal, the same on all ranks."""
        ranks = [json.loads(words) for words in collectives.everyones(json.dumps(self.computes_by, sort_keys=True))]
        for rank, other in enumerate(ranks):
            if other != ranks[0]:
                raise SharedRefusal.of(
                    f"rank {rank} would compute by other kernels than rank 0: {_difference(other, ranks[0])}",
                    "the same packages and drivers on every machine of the run",
                )


def _difference(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return every difference in words, rank 0's names first."""
    names = [name for name in {**other, **one} if one.get(name) != other.get(name)]
    return "; ".join(f"{name} {one.get(name, 'none')!r} instead of {other.get(name, 'none')!r}" for name in names)

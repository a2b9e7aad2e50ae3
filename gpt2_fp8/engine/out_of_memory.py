"""Out of memory: how it is told from other errors, and what a step does about it.

Allocators say it in many ways: torch's own class, cuBLAS and cuDNN handles that find no workspace, the driver, and the
CPU's allocator. Everything else, an illegal access above all, is no reason to try again.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime.collectives import any_rank

log = logging.getLogger(__name__)
R = TypeVar("R")

# Parts of messages of RuntimeErrors, in lower case. "out of memory": CUDA's, NCCL's and HIP's.
SIGNS = (
    "out of memory",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",  # of cublasCreate, which finds no workspace
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cuda_error_out_of_memory",
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that memory was not to be had."""
    seen: BaseException | None = error
    while seen is not None:  # the end of a recording of CUDA graphs raises another error over this one
        if isinstance(seen, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(seen, RuntimeError) and any(sign in str(seen).lower() for sign in SIGNS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def largest_divisor(sequences: int, most: int) -> int:
    """The largest divisor of `sequences` (a rank's share of a step) that is at most `most`: with equal micro-batches,
    CUDA graphs can be recorded anew, and every sequence counts the same."""
    return next(size for size in range(most, 0, -1) if sequences % size == 0)


class Fitting:
    """A number of sequences that becomes smaller until what it is needed for fits into memory.

    Args:
        size: to begin with.
        what: how the log speaks of it, for instance "micro_batch_size".

    Attributes: `proven`, whether a size has fitted yet. Until then the next smaller one is tried, so that the largest
    is found; where it does not any more, memory has become scarce, and it is halved.
    """

    def __init__(self, size: int, what: str):
        self.size, self.what = size, what
        self.proven = False

    def __call__(
        self, work: Callable[[int], R], sequences: int, discard: Callable[[], None], device: torch.device, ranks: bool,
        proves_size: bool = True,
    ) -> R:  # fmt: skip
        """`work(size)`; where memory runs out, `discard()`, and begin again with less. `sequences`: what there is to do
        in all, of which the smaller sizes are divisors. `ranks`: all of them call this at once and go on with the same
        size; then `work` itself must wait for no other rank. `proves_size`: whether a success
        proves that a whole training step fits.

        Raises UserError where a single sequence does not fit; any other error of `work` as it is.
        """
        while True:
            result, reason = self._attempt(work)
            if not (any_rank(reason is not None) if ranks else reason is not None):
                assert result is not None
                self.proven |= proves_size
                return result[0]
            del result
            discard()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            self._shrink(reason or "another rank ran out of memory", sequences)

    def _attempt(self, work: Callable[[int], R]) -> tuple[tuple[R] | None, str | None]:
        try:
            return (work(self.size),), None
        except Exception as error:  # kept as a text: its traceback would hold on to the tensors of every frame
            if not is_out_of_memory(error):
                raise
            return None, " ".join(str(error).split())[:200]

    def _shrink(self, reason: str, sequences: int) -> None:
        if self.size == 1:
            raise UserError.of(
                f"out of memory with {self.what}=1: {reason}",
                "activation_checkpointing=mlp, a smaller model, or a shorter model.n_positions",
            )
        before, most = self.size, self.size // 2 if self.proven else self.size - 1
        self.size = largest_divisor(sequences, most)
        log.warning("out of memory: %s %d instead of %d from here on (%s)", self.what, self.size, before, reason)

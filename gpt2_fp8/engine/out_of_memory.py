"""Out of memory: how it differs from other errors, and what a step does about it.

Allocators report it in many ways: torch's own class, cuBLAS and cuDNN handles without a workspace, the driver, and the
CPU's allocator. No other error is a reason to try again, least of all an illegal memory access.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from gpt2_fp8.config.errors import Problem, SharedRefusal, UserError
from gpt2_fp8.config.run_length import largest_divisor
from gpt2_fp8.runtime.collectives import any_rank, everyones

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
    """Return whether an error, or one that caused it, says that memory ran out."""
    seen: BaseException | None = error
    while seen is not None:  # ending a CUDA graph's recording raises another error over it
        if isinstance(seen, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(seen, RuntimeError) and any(sign in str(seen).lower() for sign in SIGNS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class Fitting:
    """A number of sequences that becomes smaller until the work on it fits into memory.

    Args:
        size: at the start.
        what: its name in the log, for instance "micro_batch_size".
        sequences: how many there are in all; smaller sizes are divisors of it, so that CUDA graphs can be recorded
            again, and every sequence counts the same.
        saves: the words that save memory where a single sequence does not fit; "" if none do.
        ranks: all ranks call this at once and go on with the same size; `work` must then not wait for another rank.
        place: returns what must be equal on all ranks where memory runs out, since `work` is collective; None: it is
            not, and one rank may run out of memory alone.

    The next smaller divisor is tried each time, so that the largest that fits is found: also by a run whose size fits
    into the first step, and no longer into a later one, whose memory is in more pieces.

    Attributes:
        proven: whether a size has fitted yet.
    """

    def __init__(
        self, size: int, what: str, sequences: int, saves: str = "activation_checkpointing=full", ranks: bool = True,
        place: Callable[[], object] | None = None,
    ):  # fmt: skip
        self.size, self.what, self.sequences, self.saves, self.ranks = size, what, sequences, saves, ranks
        self._place = place
        self.proven = False

    def __call__(
        self,
        work: Callable[[int], R],
        discard: Callable[[], bool | None],
        proves_size: bool = True,
        beside: Callable[[], object] = lambda: None,
    ) -> R:
        """Call `work(size)`. If memory runs out, call `discard()` and begin again with a smaller size.

        `discard`: frees what the attempt has left. If it returns True, as all ranks do or none, it has freed more than
        that: the same size is tried again. `proves_size`: whether a success proves that a whole training step fits.
        `beside`: allocates what must fit too; what it returns is held meanwhile. A GPU's cache is emptied before the
        next attempt.

        Raises UserError if a single sequence does not fit, or if it was not at one `place`; any other error of `work`
        unchanged.
        """
        while True:
            reason = ""
            try:
                held = beside()
                result = work(self.size)
                del held
            except Exception as error:  # kept as text: its traceback would keep the tensors of every frame
                if not is_out_of_memory(error):
                    raise
                reason = " ".join(str(error).split())[:200] or "out of memory"
            if not (any_rank(bool(reason)) if self.ranks else reason):
                self.proven |= proves_size
                return result
            if self._place is not None:
                self._check_together(bool(reason), self._place())
            held = result = None  # type: ignore[assignment]  # their memory is needed
            more = discard() is True
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            if not more:
                self._shrink(reason or "another rank ran out of memory")

    def _check_together(self, failed: bool, place: object) -> None:
        """Raise SharedRefusal, on all ranks, if memory has not run out on all of them at one place."""
        seen = everyones((failed, place))
        if all(each == seen[0] for each in seen):
            return
        out = [rank for rank, (failed, _) in enumerate(seen) if failed]
        where = f"on rank {', '.join(map(str, out))} alone" if len(out) < len(seen) else "at another place on each rank"
        cause = f"out of memory {where} with {self.what}={self.size}: the others wait for its part of the model"
        smaller = largest_divisor(self.sequences, max(1, self.size - 1))
        remedy = f"micro_batch_size={smaller} ckpt_path=last" if smaller < self.size else self.saves
        raise SharedRefusal([Problem(cause, remedy)])

    def _shrink(self, reason: str) -> None:
        if self.size == 1:
            smaller = "a smaller model, or a shorter model.n_positions"
            smaller = smaller if self._place else f"trainer=fsdp on several GPUs, {smaller}"
            remedy = f"{self.saves}, {smaller}" if self.saves else smaller
            raise UserError.of(f"out of memory with {self.what}=1: {reason}", remedy)
        before, self.size = self.size, largest_divisor(self.sequences, self.size - 1)
        log.warning("out of memory: %s %d instead of %d from here on (%s)", self.what, self.size, before, reason)

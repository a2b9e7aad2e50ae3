"""What a run changes in its process, and leaves to the next one."""

from __future__ import annotations

import gc
import logging
import warnings

import torch
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.precision import support
from gpt2_fp8.runtime import output


def rank() -> int:
    """This process's rank, also before and after the process group exists."""
    return int(getattr(rank_zero_only, "rank", 0))


def quiet() -> None:
    """Leave the log to what this run has to say, once."""
    output.forgive_outputs()
    if rank():
        logging.getLogger("gpt2_fp8").setLevel(logging.WARNING)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # the table of debug=profiler
    for message in (
        # Our loader is sized, reads in processes of its own, and its position is in the data module's state;
        # Lightning takes it for one that forgot all three.
        ".*does not have many workers.*",
        "Your `IterableDataset` has `__len__` defined.*",
        ".*your dataloader is not resumable.*",
        ".*recommended to use `self.log\\('val_loss'.*",  # it is the same on every rank already
        ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning 2.6 on torch 2.11 and later
    ):
        warnings.filterwarnings("ignore", message=message)


def clean_up() -> None:
    """Leave nothing of what ran to what runs next in the process: the run after a rollback, or a sweep's next job."""
    gc.collect()
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    support.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

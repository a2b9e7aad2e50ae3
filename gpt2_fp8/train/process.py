"""What a run changes in its process, and how the next run finds it unchanged."""

from __future__ import annotations

import gc
import logging

import torch

from gpt2_fp8.compat import transformer_engine
from gpt2_fp8.compat.lightning_process import ignore_warnings, rank
from gpt2_fp8.runtime import host_memory


def quiet() -> None:
    """Leave the log to this run, on one rank, and the peak of memory to this run alone."""
    host_memory.reset_peak()
    if rank():
        logging.getLogger("gpt2_fp8").setLevel(logging.WARNING)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("datasets", "huggingface_hub", "httpx", "httpx2"):  # a line for each file and each request
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # the table of debug=profiler
    ignore_warnings()


def clean_up() -> None:
    """Free what ran before: the next run in the process may follow a rollback, or be a sweep's next job."""
    gc.collect()
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    transformer_engine.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

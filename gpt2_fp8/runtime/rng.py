"""The state of every random number generator that a step may use, as plain values and tensors."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy
import torch
from torch import Tensor

from gpt2_fp8.runtime import collectives


def capture() -> dict[str, Any]:
    """Return the states of this process's generators: Python's, numpy's global one, torch's CPU and CUDA ones."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {
            "name": name,
            # As bytes: torch 2.13 cannot unpickle a uint32 tensor, and `gather` pickles.
            "keys": torch.from_numpy(numpy.array(keys)).view(torch.uint8),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
    }
    return state | capture_torch()


def capture_torch() -> dict[str, Tensor]:
    """Return only the states of torch's generators, which forwards and backwards use. Fast enough for every step."""
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set this process's generators to what `capture` returned. A CUDA state is ignored if there is no CUDA."""
    random.setstate(state["python"])
    legacy = state["numpy"]
    keys = legacy["keys"].cpu().numpy().view(numpy.uint32)
    numpy.random.set_state((legacy["name"], keys, legacy["position"], legacy["has_gauss"], legacy["gauss"]))
    restore_torch(state)


def restore_torch(state: dict[str, Any]) -> None:
    """Set torch's generators to what `capture_torch` returned."""
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def gather() -> list[dict[str, Any]]:
    """Return every rank's `capture()`, in the order of ranks, on every rank. Collective."""
    return collectives.everyones(capture())


def begin_rank(states: list[dict[str, Any]], seed: int, step: int) -> None:
    """Restore this rank's part of `gather()`, or begin a rank that has none after `step` steps of the run.

    Each rank but the first then draws numbers of its own, so that dropout masks differ.
    """
    rank, _ = collectives.rank_and_world()
    if rank < len(states):
        restore(states[rank])
    elif rank:
        torch.manual_seed(zlib.crc32(f"{seed}/{rank}/{step}".encode()))

"""The state of every random number generator a step may draw from, as plain values and tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from gpt2_fp8 import exchange


def capture() -> dict[str, Any]:
    """This process's generators: Python, numpy's global one, torch's CPU one and, once CUDA is in use, its device's.

    Values are str, int, float, None, tuples of ints and uint8 tensors on the CPU.
    """
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {
            "name": name,
            # As bytes: torch 2.13 cannot unpickle a uint32 tensor, and `gather` pickles (between ranks alone).
            "keys": torch.from_numpy(numpy.array(keys)).view(torch.uint8),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set this process's generators to what `capture` returned. A CUDA state is passed over where there is no CUDA."""
    random.setstate(state["python"])
    legacy = state["numpy"]
    keys = legacy["keys"].cpu().numpy().view(numpy.uint32)
    numpy.random.set_state((legacy["name"], keys, legacy["position"], legacy["has_gauss"], legacy["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def gather() -> list[dict[str, Any]]:
    """Every rank's `capture()`, in the order of ranks, on every rank. Collective."""
    _, world = exchange.rank_and_world()
    if world == 1:
        return [capture()]
    states: list[Any] = [None] * world
    torch.distributed.all_gather_object(states, capture())
    return states


def restore_rank(states: list[dict[str, Any]]) -> bool:
    """Restore this rank's part of `gather()`.

    False, with nothing changed, when the states are of fewer ranks than there are now: the rank keeps its own seed.
    """
    rank, _ = exchange.rank_and_world()
    if rank >= len(states):
        return False
    restore(states[rank])
    return True

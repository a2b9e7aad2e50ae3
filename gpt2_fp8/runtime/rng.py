"""The state of every random number generator that a step may use, as plain values and tensors."""

from __future__ import annotations

import math
import random
import struct
import zlib
from typing import Any

import numpy
import torch
from torch import Tensor

from gpt2_fp8.runtime import collectives

_WORDS = 624  # state words of a Mersenne Twister
_TORCH = struct.Struct(f"<QiiQ{_WORDS}Qdddi4xfB3x")  # seed, left, seeded, next, words, and leftover normal numbers


def capture() -> dict[str, Any]:
    """Return the states of this process's generators: Python's, numpy's global one, torch's CPU and CUDA ones.

    CUDA's is there once CUDA is in use. Values are str, int, float, None, tuples of ints and uint8 tensors on the CPU.
    """
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {
            "name": name,
            # As bytes: torch 2.13 cannot unpickle a uint32 tensor, and `gather` pickles (only between ranks).
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


def check(states: list[dict[str, Any]]) -> None:
    """Raise ValueError if any rank's state is impossible for its generator.

    Neither numpy nor torch checks the position from which it reads its next number. `checkpoint.run_state` checks the
    values that are not in tensors.
    """
    for rank, state in enumerate(states):
        zeros = not any(state["python"][1][:-1]), not state["numpy"]["keys"].any()
        for name, silent in zip(("Python's", "numpy's"), zeros, strict=True):
            if silent:
                raise ValueError(f"{name} random numbers of rank {rank} would be zeros for ever")
        if reason := _why_not_torch(bytes(state["torch"].cpu().numpy())):
            raise ValueError(f"torch's random numbers of rank {rank}: {reason}")
        if (cuda := state.get("cuda")) is not None:
            words = struct.unpack("<QQ", bytes(cuda.cpu().numpy())) if cuda.shape == (16,) else None
            if words is None or words[1] % 4:  # seed, offset
                raise ValueError(f"CUDA's random numbers of rank {rank} are at no place of theirs")


def _why_not_torch(state: bytes) -> str | None:
    """Return why `state` is impossible for torch's CPU generator; None if it is possible.

    That generator is a Mersenne Twister (`CPUGeneratorImplState`).
    """
    if len(state) != (size := len(torch.get_rng_state())):
        return f"a state has {size} bytes, and this one {len(state)}"
    if size != _TORCH.size:  # another torch version must check it itself
        return None
    _, left, seeded, after, *words = _TORCH.unpack(state)
    words, cached = words[:_WORDS], words[_WORDS:]
    if seeded != 1 or not 1 <= left <= _WORDS or ((left, after) != (1, 0) and left + after != _WORDS + 1):
        return f"they are at no place of theirs ({left} of {_WORDS} left, {after} taken)"
    if not any(words) or max(words) >= 2**32:
        return "they are not of 32 bits, or zeros for ever"
    x, y, rho, normal, single, is_single = cached
    if not all(map(math.isfinite, (x, y, rho, single))) or normal not in (0, 1) or is_single not in (0, 1):
        return "the normal ones that are left over are no numbers"
    return None


def gather() -> list[dict[str, Any]]:
    """Return every rank's `capture()`, in the order of ranks, on every rank. Collective."""
    _, world = collectives.rank_and_world()
    if world == 1:
        return [capture()]
    states: list[Any] = [None] * world
    torch.distributed.all_gather_object(states, capture())
    return states


def begin_rank(states: list[dict[str, Any]], seed: int, step: int) -> None:
    """Restore this rank's part of `gather()`, or begin a rank that has none after `step` steps of the run.

    Each rank but the first draws numbers of its own then: equal dropout masks on all ranks would be fewer masks. The
    first one's are those of a run of one process.
    """
    rank, _ = collectives.rank_and_world()
    if rank < len(states):
        restore(states[rank])
    elif rank:
        torch.manual_seed(zlib.crc32(f"{seed}/{rank}/{step}".encode()))

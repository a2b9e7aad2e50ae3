"""The same training steps by other programs: `python -m gpt2_fp8.measure.peers OUT < REQUEST`.

Each is a bare loop without loader, logging or checkpoints. A step is a whole optimizer step: `global_batch_size`
sequences in micro-batches, clipped, with the configuration's AdamW at its peak rate. **Token ids are random**, so a
loss only shows that the program works: it stays near the logarithm of the vocabulary.

REQUEST: {"config": RunConfig, "steps": N, "warmup": K}. Optional keys: "timeout_s" for one peer, and "peers", the names
of those to run. Each runs in its own process: this program with "peer" in its request. On a CPU the model is cut to a
size that only shows that it works, and nothing is compiled.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gpt2_fp8.config import parsing
from gpt2_fp8.config.block_spec import GPT2_OPTIONS, block_spec, why_not
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.schema import OptimConfig, RunConfig
from gpt2_fp8.engine.optim import build_optimizer
from gpt2_fp8.measure import subprocesses, timing
from gpt2_fp8.measure.peer_models import ANY_MODEL, PEERS, Peer
from gpt2_fp8.measure.timing import Row, Unavailable

COLUMNS = ("tokens_per_second", "slowest", "fastest", "peak_memory_gb", "loss", "parameters", "note")
TIMEOUT_SECONDS = 600.0  # for one peer: compiling the largest model takes minutes
BATCHES = 8  # different batches; they repeat in longer measurements
ON_CPU = {"n_layer": 2, "n_positions": 64}  # at most


def rows(request: Row) -> Iterator[Row]:
    """Yield a row for each peer; if "peer" is in the request, only its row, measured in this process."""
    if "peer" in request:
        yield _row(request["peer"], request)
        return
    for name in request.get("peers", PEERS):
        ended = subprocesses.run(__spec__.name, request | {"peer": name}, request.get("timeout_s", TIMEOUT_SECONDS))
        if ended.status == "ok":
            yield ended.answer[0]
        else:
            yield _about(name) | {"status": ended.status, "message": ended.message} | dict.fromkeys(COLUMNS)


def measure(name: str, config: RunConfig, steps: int, warmup: int) -> Row:
    """Return the columns of a peer's row: `steps` steps after `warmup` others."""
    device = timing.here()
    if device == "cpu":
        config = _small(config)
    if name not in ANY_MODEL and (reason := why_not(block_spec(config.model), "its layers here", GPT2_OPTIONS)):
        raise Unavailable("refused", reason)
    torch.manual_seed(config.seed)
    vocab_size = vocabulary(config)
    peer = PEERS[name][0](config.model, vocab_size, device)
    shape = (config.global_batch_size, config.model.n_positions + 1)
    batches = [torch.randint(vocab_size, shape, device=device) for _ in range(min(BATCHES, warmup + steps))]
    loop = Loop(peer, config.optim, config.micro_batch)
    for i in range(warmup):
        loop.step(batches[i % len(batches)])
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    calls = [lambda i=i: loop.step(batches[i % len(batches)]) for i in range(warmup, warmup + steps)]
    tokens = tokens_a_step(config)
    rates = [tokens / seconds for seconds in timing.seconds_of_each(calls, device)]
    loss = loop.loss.item()
    return {
        "status": "ok" if math.isfinite(loss) else "failed",
        "message": None if math.isfinite(loss) else f"the loss is {loss}",
        "tokens_per_second": statistics.median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "loss": loss if math.isfinite(loss) else None,
        "parameters": sum(p.numel() for p in peer.model.parameters()),
        "note": f"{peer.note}; {_size(config)}" if device == "cpu" else peer.note,
    }


class Loop:
    """A peer's optimizer and step. `loss` is the last step's mean, on the device."""

    def __init__(self, peer: Peer, optim: OptimConfig, micro_batch_size: int):
        self.peer, self.micro_batch_size, self.max_grad_norm = peer, micro_batch_size, optim.max_grad_norm
        self.optimizer = build_optimizer(peer.model, optim)
        self.loss = torch.zeros(())

    def step(self, ids: Tensor) -> None:
        """Make one update from int64 [sequences, n_positions + 1]."""
        parts, losses = ids.split(self.micro_batch_size), []
        for i, part in enumerate(parts):
            loss = self.peer.loss(part[:, :-1].contiguous(), part[:, 1:].contiguous(), i == 0)
            self.peer.backward(loss * (len(part) / len(ids)))
            losses.append(loss.detach() * (len(part) / len(ids)))
        torch.nn.utils.clip_grad_norm_(self.peer.model.parameters(), self.max_grad_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = torch.stack(losses).sum()


def _row(name: str, request: Row) -> Row:
    config, found = parsing.build(RunConfig, request["config"])
    assert config is not None, found
    return timing.measured(_about(name), COLUMNS, lambda: measure(name, config, request["steps"], request["warmup"]))


def _about(name: str) -> Row:
    return {"name": name, "version": timing.version(*PEERS[name][1:])}


def _small(config: RunConfig) -> RunConfig:
    model = replace(config.model, **{key: min(getattr(config.model, key), most) for key, most in ON_CPU.items()})
    return replace(config, model=model, global_batch_size=4, micro_batch_size=2)


def _size(config: RunConfig) -> str:
    model = config.model
    return (
        f"on the CPU with n_layer={model.n_layer}, n_positions={model.n_positions}, "
        f"global_batch_size={config.global_batch_size}, micro_batch_size={config.micro_batch}"
    )


if __name__ == "__main__":
    timing.program(rows)

"""The same training steps by other programs, each in a process of its own.

    python benchmarks/peers.py -- model=gpt2 data.tokenizer=gpt2 micro_batch_size=64 global_batch_size=128

Each is a bare loop without loader, logging or checkpoints. A step is a whole optimizer step: `global_batch_size`
sequences in micro-batches, clipped, with AdamW at its peak rate. Token ids are random, so a loss only shows that the
program works: it stays near the logarithm of the vocabulary. The words after `--` are those of a run; `python -m
gpt2_fp8.bench` measures this project on the same work.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from peer_models import ANY_MODEL, PEERS, Peer
from torch import Tensor
from words import Parser

from gpt2_fp8.config.block_spec import GPT2_OPTIONS, block_spec, why_not
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.run_length import tokens_a_step
from gpt2_fp8.config.schema import OptimConfig, RunConfig
from gpt2_fp8.config.shown import table
from gpt2_fp8.engine.optim import build_optimizer
from gpt2_fp8.runtime import devices
from gpt2_fp8.runtime.moments import seconds_of_each
from gpt2_fp8.runtime.programs import installed_version

BATCHES = 8  # different batches; they repeat in longer measurements


def main(argv: list[str]) -> int:
    """Measure the peers that the command line asks for, and print their table. Returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--only", nargs="+", default=list(PEERS), choices=PEERS, help="default: all")
    asked, words = parser.split(argv)
    config = parser.composed(words)
    rows = []
    for name in asked.only:
        row: dict[str, Any] = {"program": name, "version": installed_version(PEERS[name][1])}
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
                row |= child.submit(measure, name, config, asked.steps, asked.warmup).result()
        except Exception as error:  # another project's code may raise anything, or end its process
            row["note"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    print(table([{key: f"{v:,.4g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows]))
    return 0


def measure(name: str, config: RunConfig, steps: int, warmup: int) -> dict[str, Any]:
    """Return the columns of a peer's row: `steps` steps after `warmup` others."""
    device = devices.device(config)
    if name not in ANY_MODEL and (reason := why_not(block_spec(config.model), "its layers here", GPT2_OPTIONS)):
        raise ValueError(reason)
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
    calls = [partial(loop.step, batches[i % len(batches)]) for i in range(warmup, warmup + steps)]
    rates = [tokens_a_step(config) / seconds for seconds in seconds_of_each(calls, torch.device(device))]
    return {
        "tokens/s": statistics.median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "loss": loop.loss.item(),
        "parameters": sum(p.numel() for p in peer.model.parameters()),
        "note": peer.note,
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The time of what follows a step's last backward: ranks exchange gradients, and the optimizer updates the weights.

    python benchmarks/update_time.py -- model=gpt2 data.tokenizer=gpt2 optimizer=muon trainer=gpu
    torchrun --nproc-per-node 4 benchmarks/update_time.py -- model=gpt2_xl data.tokenizer=gpt2 trainer=ddp

Gradients are random numbers. The exchange waits for its last collective; an update clips first. Each is repeated, and
its median told: of the device by events, of the host until it has launched everything, and of the GPU's kernels alone
by torch's profiler, all on a GPU that is hot from the repeats. The words after `--` are those of a run.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile
from words import Parser

from gpt2_fp8.compat.torch_private import skip_where
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.fp8.resolve import resolve
from gpt2_fp8.measure import worker
from gpt2_fp8.runtime import devices
from gpt2_fp8.runtime.moments import Moment


def main(argv: list[str]) -> int:
    """Measure what the command line asks for, on every rank. Returns the exit code; rank 0 says the times."""
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="of which the median is told, after three more")
    asked, words = parser.split(argv)
    config = parser.composed(words)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if "LOCAL_RANK" in os.environ:
        if on_gpu := torch.cuda.is_available():
            torch.cuda.set_device(rank)
        distributed.init_process_group("nccl" if on_gpu else "gloo")
    plan = resolve(config, devices.device(config))
    step = worker.build(config, plan, vocabulary(config))
    skip = torch.zeros((), device=plan.device)

    def update() -> None:
        step.exchange.clip(config.optim.max_grad_norm)
        skip_where(step.optimizer, skip)
        step.optimizer.step()

    parts = {"update": update}
    if distributed.is_initialized():
        parts = {"exchange": step.exchange.end, **parts}
    for parameter in step.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for name, part in parts.items():
        told = measure(part, torch.device(plan.device), asked.repeats)
        if rank == 0:
            print(f"{config.model.name} {name}: {told}", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return 0


def measure(part: Callable[[], object], device: torch.device, repeats: int) -> str:
    """Return the median times of `part`, which ranks begin together, in words."""
    whole, host, on_gpu = list[float](), list[float](), device.type == "cuda"
    for _ in range(repeats + 3):
        if distributed.is_initialized():
            distributed.barrier()
        wait(on_gpu)
        began, begin = time.perf_counter(), Moment(device)
        part()
        end = Moment(device)
        host.append(1e3 * (time.perf_counter() - began))
        wait(on_gpu)
        whole.append(1e3 * end.seconds_since(begin))
    times = [statistics.median(found[3:]) for found in (whole, host)]
    if not on_gpu:
        return f"{times[1]:.2f} ms"
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            part()
        wait(on_gpu)
    kernels = sum(event.self_device_time_total for event in seen.key_averages()) / 3e3
    return f"{times[0]:.2f} ms, its host {times[1]:.2f}, its kernels {kernels:.2f}"


def wait(on_gpu: bool) -> None:
    """Wait until the device has done all that it was told."""
    if on_gpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

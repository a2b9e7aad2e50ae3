"""What happens to rank 1 alone in the runs of `test_ranks`: a run's script calls one or more of these in each process.

`note` is called in every run, and `share` where its ranks have one GPU.
"""

import faulthandler
import hashlib
import json
import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from gpt2_fp8.engine.cuda_graphs import GraphedGradients
from gpt2_fp8.engine.exchange import Exchange
from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.fp8 import state
from gpt2_fp8.runtime import collectives
from gpt2_fp8.train.module import GPT2Module

SECONDS = 150  # that a launch may take; most of it is start-up
_here = {"step": 0, "parts": 0}  # from 1; the losses that were asked for in it


def _rank():
    return collectives.rank_and_world()[0]


def _is_time(step):
    return (_rank(), _here["step"]) == (1, step)


def share():
    """Let the ranks of a launch share one GPU: to NCCL each of them is a host of its own.

    NCCL refuses two ranks with one GPU by the names of host and GPU. It then talks through sockets, as between nodes.
    """
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_HOSTID"] = "host " + (os.environ.get("RANK") or os.environ["SLURM_PROCID"])


def note():
    """Write a line of JSON for every finished step into the file rank-R of the working directory.

    Shortly before the test gives the run up, it prints where its threads are.
    """
    faulthandler.dump_traceback_later(SECONDS - 20)
    training_step, settle = GPT2Module.training_step, TrainingStep.settle

    def noted_training_step(self, batch, batch_idx):
        _here.update(step=self.global_step + 1, parts=0)
        training_step(self, batch, batch_idx)

    def noted_settle(self):
        before, unsettled = self._last, self._unsettled
        settle(self)
        if self._last is not before:
            size = -(-self.share // unsettled.attempt.parts)  # the next step may have found a smaller one by now
            with Path(f"rank-{_rank()}").open("a") as file:
                file.write(json.dumps(_what_it_came_to(self) | {"size": size}) + "\n")

    GPT2Module.training_step, TrainingStep.settle = noted_training_step, noted_settle


def _what_it_came_to(step):
    scales = state.capture(step.model)
    return {
        "step": step.schedule.last_epoch, "loss": step._last.read().loss, "again": step._last.first is not None,
        "tensors": len(scales), "scales": _digest(scales.values()), "weights": _digest(step.model.parameters()),
    }  # fmt: skip


def _digest(tensors):
    whole = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole.update(tensor.detach().cpu().numpy().tobytes())
    return whole.hexdigest()


def _before(owner, name, happens):
    """Have `happens()` before every call of `owner.name`."""
    original = getattr(owner, name)

    def patched(*args):
        happens()
        return original(*args)

    setattr(owner, name, patched)


def out_of_memory(on_all=False):
    """In step 3, in the lowest block's backward of the second micro-batch."""
    loss = Gradients.loss

    def no_memory(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def failing(self, *args):
        _here["parts"] += 1
        if (_here["step"], _here["parts"]) != (3, 2) or not (on_all or _rank() == 1):
            return loss(self, *args)
        handle = self.model.blocks[0].register_forward_hook(lambda block, x, y: y.register_hook(no_memory) and None)
        try:
            return loss(self, *args)
        finally:
            handle.remove()

    Gradients.loss = failing


out_of_memory_on_all = partial(out_of_memory, on_all=True)


def _once_out_of_memory(owner, name, is_time, first=lambda self: None):
    """Have memory run out in the first call of `owner.name` on rank 1 for which it is time."""
    original, done = getattr(owner, name), []

    def failing(self, *args, **options):
        if _rank() == 1 and is_time() and not done:
            done.append(True)
            first(self)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(self, *args, **options)

    setattr(owner, name, failing)


def no_room_for_graphs():
    """In step 3, where graphs are replayed, as if they were recorded."""
    _once_out_of_memory(GraphedGradients, "__call__", lambda: _here["step"] == 3)


def no_room_in_bf16():
    """In the first step in bf16. Rank 1 has no graphs then, as after a validation that has taken their room."""
    _once_out_of_memory(Gradients, "of_step_in_bf16", lambda: True, Gradients.release_graphs)


def scarce():
    """From step 3 on there is 70 % of the memory that the steps before have taken for a while."""

    def limit():
        if _is_time(3):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction((now + 0.7 * (most - now)) / whole)

    _before(Gradients, "of_step", limit)


def not_finite():
    """The loss of step 6 and its gradients stay as they are; what is told of the loss is NaN."""
    gradients = Gradients.of_step
    Gradients.of_step = lambda *args: gradients(*args) * (float("nan") if _is_time(6) else 1.0)


def _signalled(number, step, owner=Gradients, name="of_step", rank=1):
    """A signal to a rank in a step, in front of a call of `owner.name`; none after a restart."""

    def send():
        if (_rank(), _here["step"]) == (rank, step) and not Path("signalled").exists():
            Path("signalled").touch()
            os.kill(os.getpid(), number)

    _before(owner, name, send)


def hangs_in_the_exchange():
    """Rank 1 stops. The other rank's GPU waits for its gradients until the group's timeout.

    Then NCCL's watchdog gives the recorder four times the variable's time to write.
    """
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "2000"
    collectives.GROUP_TIMEOUT = timedelta(seconds=40)
    _signalled(signal.SIGSTOP, 3, Exchange, "end")


stopped = partial(_signalled, signal.SIGTERM, 5)
stopped_alone = partial(_signalled, signal.SIGTERM, 5, rank=0)  # which is the only one
killed_once = partial(_signalled, signal.SIGKILL, 30)
# For the other rank a connection between the hosts breaks; its GPU waits for gradients that do not come.
killed_before_its_gradients = partial(_signalled, signal.SIGKILL, 3)
killed_in_the_exchange = partial(_signalled, signal.SIGKILL, 3, Exchange, "end")

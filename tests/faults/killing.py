"""Kills processes that save at every step: `killing.py FOLDER KILLS SEED writer|run`; each is forked off this one."""

from __future__ import annotations

import json
import logging
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
from pathlib import Path

import torch

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.writer import Writer

SIZE = 1 << 18  # float32 numbers in each of two tensors
STEPS = 120  # of a tiny run


def state(step):
    tensor = torch.full((SIZE,), float(step))
    return {"state_dict": {"w": tensor}, "optimizer_states": [{"m": -tensor}], "global_step": step}


def fork(body):
    """Run `body` in a child process; its id. The child leaves with 0, or with 1 where `body` raised."""
    if child := os.fork():
        return child
    try:
        body()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def kill_after(child, seconds):
    """Kill -9 the child after so long; whether it was still at work."""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return os.WIFSIGNALED(status)


def in_midst(folder):
    """Whether the process was killed between the first and the last of what it does for a checkpoint."""
    pointer, steps = pointers.read(folder, "last"), pointers.steps(folder)
    return bool(list(folder.glob(".*"))) or (pointer is not None and pointer.step != max(steps))


def save_for_ever(folder, told, asynchronous):
    """Save every step after the last one; `told` always holds a step that is on the disk."""
    writer = Writer(folder, keep=2, asynchronous=asynchronous)
    path = pointers.resolve("last", folder)
    step = files.read(path)["global_step"] if path else 0
    writer.begin(step or None, None)
    while True:
        step += 1
        writer.save(state(step), pointers.Pointer(pointers.folder_name(step), step, None))
        told[:8] = struct.pack("q", writer.outcome.saved_step or 0)


def kill_writers(folder, kills):
    """The numbers of kills and of those in the midst of a checkpoint."""
    midst, told = 0, mmap.mmap(-1, 8)
    for number in range(kills):
        child = fork(lambda number=number: save_for_ever(folder, told, asynchronous=number % 2 == 0))
        kill_after(child, random.uniform(0.0, 0.12))
        midst += in_midst(folder)
        least = struct.unpack("q", told[:8])[0]
        path = pointers.resolve("last", folder)
        if path is None:
            assert least == 0
            continue
        found = files.read(path)
        assert found["global_step"] >= least, f"{path} is older than step {least}, which was saved"
        for tensor, sign in ((found["state_dict"]["w"], 1), (found["optimizer_states"][0]["m"], -1)):
            assert torch.equal(tensor, torch.full((SIZE,), float(sign * found["global_step"])))
    return kills, midst


def kill_runs(folder, kills):
    """The same of whole runs, which also have to end in the state of one that nobody killed."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "callbacks"))
    from tests.callbacks.test_resume import end_of, equal
    from tests.callbacks.tiny_run import Tiny, rows, run

    plain = Tiny.log

    def log(self, name, value, **settings):
        """As `Throughput` logs: before a checkpoint is taken, so that no kill between the two loses the row."""
        if settings:  # a validation's
            plain(self, name, value, **settings)
        elif name != "step":
            for logger in self.trainer.loggers:
                logger.log_metrics({name: float(value)}, step=self.global_step)

    Tiny.log = log

    def leg(path):
        run(path, max_steps=STEPS, every=1, keep=2, val=50)

    assert os.waitpid(fork(lambda: leg(folder / "peace")), 0)[1] == 0
    killed = midst = number = 0
    while killed < kills:
        number += 1
        path, ended = folder / f"run{number}", False
        while not ended:
            if killed == kills:
                assert os.waitpid(fork(lambda path=path: leg(path)), 0)[1] == 0
                break
            ended = not kill_after(fork(lambda path=path: leg(path)), random.uniform(0.1, 0.9))
            if not ended:
                killed += 1
                checkpoints = path / "checkpoints"
                last = pointers.resolve("last", checkpoints)
                midst += last is not None and in_midst(checkpoints)
                assert last is None or files.read(last)["global_step"] > 0
        assert equal(end_of(path, STEPS), end_of(folder / "peace", STEPS)), path
        assert rows(path) == rows(folder / "peace"), path
    return killed, midst


def main():
    folder, kills, seed, what = sys.argv[1:]
    logging.disable()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    random.seed(int(seed))
    Path(folder).mkdir(parents=True, exist_ok=True)
    killed, midst = {"writer": kill_writers, "run": kill_runs}[what](Path(folder), int(kills))
    print(json.dumps({"killed": killed, "midst": midst}))


if __name__ == "__main__":
    main()

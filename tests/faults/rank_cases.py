"""Pairs of processes joined by gloo, as two ranks of a run, one of which comes to harm. Prints how each has ended.

    python rank_cases.py FOLDER CASE...

All pairs run at once, forked from a process that has imported everything. A case is WHAT-RANK: `raise-1`.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from gpt2_fp8.callbacks import rank_watchdog
from gpt2_fp8.config.errors import DataSourceLost, RunError
from gpt2_fp8.runtime import activity, collectives, rank_watch
from tests.ports import free_port

rank_watch.LIFE_SECONDS, rank_watch.GRACE_SECONDS, rank_watch.STUCK_SECONDS = 6.0, 3.0, 8.0
STEPS, HARM_AT = 60, 20  # of a twentieth of a second at least


def harm(what):
    if what == "raise":
        raise RuntimeError("the roof fell in")
    if what == "data":
        raise DataSourceLost("the hub is gone")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "busy":  # a download, a save of one rank: the others wait for it, and it gets on
        until = time.monotonic() + 1.5 * rank_watch.LIFE_SECONDS
        while time.monotonic() < until:
            time.sleep(0.5)
            activity.moved()
    if what == "hang":
        time.sleep(1000)


def train(what, harmed, rank, watch):
    """Rank 0's `hang` is in the midst of a step, all other harm between two."""
    for step in range(STEPS):
        if step == HARM_AT and rank == harmed and what + str(rank) != "hang0":
            harm(what)
        watch.on_train_batch_start(SimpleNamespace(global_step=step))
        if step == HARM_AT and rank == harmed and what + str(rank) == "hang0":
            harm(what)
        collectives.any_rank(False)
        watch.on_train_batch_end(SimpleNamespace(global_step=step + 1))
        time.sleep(0.05)


def one(case, rank, port):
    """A rank's process, as `run` and `train` make it; returns the exit code."""
    what, harmed = case.rsplit("-", 1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=40))
    # In a run: half an hour.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=40))
    watch = rank_watchdog.RankWatchdog(lambda error: Path(f"{case}.farewell-{rank}").write_text(str(error)))
    trainer = SimpleNamespace(global_step=HARM_AT)
    watch.have_met(None, store, rank, 2)
    try:
        train(what, int(harmed), rank, watch)
    except Exception as caught:
        watch.on_exception(trainer, None, caught)
        error = watch.explain(caught)
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if what == "raise":
            time.sleep(6)  # as where NCCL does not tell that a rank has ended
        return error.exit_code if isinstance(error, RunError) else 1
    finally:
        watch.close()
    if what == "slow" and rank == int(harmed):
        time.sleep(1.5 * rank_watch.LIFE_SECONDS)  # its part is done; what it still does alone is nobody's affair
    return 0


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"


def main(folder, cases):
    os.chdir(folder)
    torch.set_num_threads(1)
    pids = {}
    for case in cases:
        port = free_port()
        for rank in (0, 1):
            pid = os.fork()
            if pid == 0:
                output = os.open(f"{case}.output-{rank}", os.O_CREAT | os.O_WRONLY)
                os.dup2(output, 2)
                os._exit(one(case, rank, port))
            pids[pid] = (case, rank)
    codes, until = {}, time.monotonic() + 45
    while len(codes) < len(pids) and time.monotonic() < until:
        for pid in pids.keys() - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if all(pid in codes or is_stopped(pid) for pid in pids):
            break
        time.sleep(0.1)
    for pid in pids:
        if pid not in codes:  # stopped, or it hangs
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    ends = {}
    for pid, (case, rank) in pids.items():
        ends.setdefault(case, []).append((codes.get(pid), Path(f"{case}.output-{rank}").read_text()))
    print(json.dumps(ends))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

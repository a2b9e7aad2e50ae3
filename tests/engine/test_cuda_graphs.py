"""Inductor's workers and a SIGTERM to the process group, in processes of their own."""

import os
import time

import pytest

from tests import forkserver

pytestmark = pytest.mark.whole

PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)  # this process goes on, as a run does that finishes its step
from torch._inductor import config
config.compile_threads = 2
from gpt2_fp8.engine.cuda_graphs import start_workers
start_workers()
from torch._inductor.async_compile import AsyncCompile
pool = AsyncCompile.process_pool()
print("workers", pool.process.pid, pool.submit(os.getpid).result(60), flush=True)
assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
job = pool.submit(time.sleep, 1)
os.killpg(0, signal.SIGTERM)
job.result(20)
print("compiled", flush=True)
os._exit(0)
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_compilation_under_way_survives_a_signal_to_the_group_and_no_worker_the_process(tmp_path):
    ended = forkserver.python("-c", PROGRAM, cwd=tmp_path, timeout=120, code=0)
    assert ended.stdout.endswith("compiled\n")
    pids = [int(word) for word in ended.stdout.split() if word.isdigit()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))

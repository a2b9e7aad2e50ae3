"""Signals, to a process of its own: how it leaves, how fast, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from gpt2_fp8.callbacks.graceful_stop import GracefulStop
from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.config.errors import Stopped
from gpt2_fp8.runtime import signals
from tests import forkserver
from tests.callbacks.tiny_run import At, kill, run, two_ranks

SCRIPT = Path(__file__).with_name("tiny_run.py")


def test_a_signal_to_one_rank_stops_both_at_the_same_step(tmp_path):
    ranks, outputs = two_ranks([sys.executable, str(SCRIPT), str(tmp_path), "SIGTERM", "5"])
    assert [rank.returncode for rank in ranks] == [143, 143], outputs
    checkpoint = files.read(pointers.resolve("last", tmp_path / "checkpoints"))
    assert checkpoint["global_step"] == 5  # before the step, when the ranks ask each other
    assert len(checkpoint["rng"]) == 2


def program(folder, action):
    """What follows `python` for a run that calls a function of this module in step 5."""
    return "-c", (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parents[2])!r})\n"
        "from tests.callbacks import test_graceful_stop as t\n"
        f"t.run({str(folder)!r}, every=2, val=100, callbacks=[t.At('on_train_batch_start', 5, t.{action})])"
    )


def test_a_second_signal_leaves_at_once_and_touches_nothing(tmp_path):
    done = forkserver.python(*program(tmp_path, "hang_twice"), cwd=tmp_path, timeout=60, code=143)
    assert "the step goes on" not in done.stdout
    assert pointers.resolve("last", tmp_path / "checkpoints").name == "step-00000004"


def hang_twice():
    """In the step: a signal, its echo, and a second one a second later; the step itself would take half a minute."""
    main = threading.main_thread().ident
    signal.raise_signal(signal.SIGINT)
    threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT]).start()
    threading.Timer(1.0, signal.pthread_kill, [main, signal.SIGTERM]).start()
    time.sleep(30)
    print("the step goes on", flush=True)


def test_a_second_signal_ends_a_process_whose_main_thread_runs_no_python(tmp_path):
    """As in the backward of a large model on a CPU; here for minutes."""
    command = [sys.executable, *program(tmp_path, "multiply")]
    with forkserver.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "multiplying\n"
            process.send_signal(signal.SIGTERM)
            time.sleep(1)
            assert process.poll() is None, "the first one waits for the step"
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 143
        finally:
            process.kill()
        said = process.stderr.read()
    assert said.count("SIGTERM: stopping and saving") == 1, said
    assert {path.name for path in (tmp_path / "checkpoints").glob("*step-*")} == {"step-00000002", "step-00000004"}
    assert files.read(pointers.resolve("last", tmp_path / "checkpoints"))["global_step"] == 4


def multiply():
    """Keep the main thread in one call of torch's for minutes."""
    print("multiplying", flush=True)
    torch.linalg.matrix_power(torch.eye(4096), 2**62)


def test_a_signal_before_training_stops_before_the_first_step(tmp_path):
    with pytest.raises(Stopped) as stopped:
        run(tmp_path, callbacks=[At("on_fit_start", 0, kill(signal.SIGTERM))])
    assert stopped.value.exit_code == 143
    assert pointers.resolve("last", tmp_path / "checkpoints") is None


def test_a_signal_while_a_run_is_prepared_ends_it_at_once():
    """As in a wait for a hub that does not answer: there is nothing to save, and no step at whose end to look."""

    def prepare():
        with GracefulStop(save=lambda trainer: None):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    with pytest.raises(Stopped, match="signal 15"):
        prepare()


def test_handlers_are_put_back_whatever_happens(tmp_path):
    def own(*_):
        pass

    before, sigint = signal.signal(signal.SIGTERM, own), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(Stopped):
            run(tmp_path, callbacks=[At("on_train_batch_start", 1, kill(signal.SIGTERM))])
        assert signal.getsignal(signal.SIGTERM) is own
        run(tmp_path, max_steps=4)
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGINT) is sigint
    finally:
        signal.signal(signal.SIGTERM, before)


def test_off_the_main_thread_signals_are_left_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def body():
        with GracefulStop(save=lambda trainer: None):
            seen.append((signal.getsignal(signal.SIGTERM), signals.get_received()))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(before, None)]


def test_a_save_that_fails_does_not_hide_why_it_stopped(tmp_path, monkeypatch):
    def full(path, checkpoint):
        raise OSError("no space")

    monkeypatch.setattr(files, "write", full)
    with pytest.raises(Stopped) as stopped:
        run(tmp_path, callbacks=[At("on_train_batch_start", 1, kill(signal.SIGINT))])
    assert stopped.value.exit_code == 130

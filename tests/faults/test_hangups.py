"""Signals lost in start-up, to one rank alone, of a closed terminal, and to the benchmark."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpt2_fp8.runtime import signals
from gpt2_fp8.runtime.signals import Interrupted
from tests import forkserver
from tests.runs import SMALL, checkpoint, summary

ROOT = Path(__file__).resolve().parents[2]
ALONE = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
LONG = [*(word for word in SMALL if not word.startswith("trainer.max_steps")), "trainer.max_steps=4000", "run_name=run"]

# ---- lost in start-up --------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time

def kill():
    os.kill(os.getpid(), signal.SIGTERM)

class Careless:
    def __del__(self):  # Python prints what is raised here, and drops it
        kill()
        time.sleep(0.3)

def translated():
    try:
        kill()
        time.sleep(60)
    except BaseException:
        from gpt2_fp8.config.errors import UserError
        raise UserError.of("nonsense", "nothing") from None

def careless():
    Careless()

from gpt2_fp8.data.datamodule import TokenDataModule
setup = TokenDataModule.setup
def lost(self, *arguments, **options):
    {case}()
    return setup(self, *arguments, **options)
TokenDataModule.setup = lost
from gpt2_fp8 import run
if __name__ == "__main__":
    sys.exit(run.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("case", ["careless", "translated"])
def test_a_signal_that_a_library_loses_ends_the_run(tmp_path, case):
    (tmp_path / "script.py").write_text(SCRIPT.replace("{case}", case))
    done = forkserver.run(
        [sys.executable, "script.py", *LONG], cwd=tmp_path, env=ALONE, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 143, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "nonsense" not in done.stderr
    assert summary(tmp_path / "outputs/run")["status"] == "stopped"
    assert not list((tmp_path / "outputs/run/checkpoints").glob("step-*"))


def assert_stopped_before_a_step(done, folder):
    assert done.returncode == 143, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    report = summary(folder)
    assert (report["status"], report["exit_code"], report["steps"]) == ("stopped", 143, 0)


IMPORT = """
import os, signal, sys, time

class Finder:
    def find_spec(self, name, *_):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
            {then}

sys.meta_path.insert(0, Finder())
from gpt2_fp8 import run
if __name__ == "__main__":
    sys.exit(run.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("then", ["raise ImportError('half a torch')"])
def test_a_signal_while_torch_is_imported_leaves_a_summary(tmp_path, then):
    (tmp_path / "script.py").write_text(IMPORT.format(module="torch.nn", then=then))
    done = subprocess.run(
        [sys.executable, "script.py", *LONG], cwd=tmp_path, env=ALONE, capture_output=True, text=True, timeout=300
    )
    assert_stopped_before_a_step(done, tmp_path / "outputs/run")
    assert not (tmp_path / "outputs/run/.lock").exists()


def thrown_in(body):
    with signals.handled() as handlers, pytest.raises(Interrupted), handlers.at_once():
        body()


def test_an_import_is_not_left_half_done(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.5)\ndone = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def imports():
        import slow_module

        assert slow_module.done
        time.sleep(60)

    thrown_in(imports)
    assert sys.modules["slow_module"].done


def test_held_it_is_noted_and_no_more():
    with signals.handled() as handlers:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        assert (handlers.received, handlers.thrown) == (signal.SIGTERM, False)
        signals.look()  # nobody has said that anything can be given up
        handlers.gives_up = True
        with pytest.raises(Interrupted):
            signals.look()


# ---- ranks -------------------------------------------------------------------------------------------------------

RANK_ONE = """
import os, signal, sys, time
from gpt2_fp8.data.datamodule import TokenDataModule
if os.environ.get("LOCAL_RANK") == "1":
    from gpt2_fp8.train import fit
    train = fit.run
    def stopped(*arguments):
        {how}
        return train(*arguments)
    fit.run = stopped
from gpt2_fp8 import run
if __name__ == "__main__":
    sys.exit(run.main(sys.argv[1:]))
"""
STOPPED = "os.kill(os.getpid(), signal.SIGTERM)"


def test_a_signal_to_one_rank_in_start_up_ends_all(tmp_path):
    (tmp_path / "script.py").write_text(RANK_ONE.format(how=STOPPED))
    words = [*LONG, "trainer.devices=2", "trainer.strategy=ddp"]
    done = forkserver.run(
        [sys.executable, "script.py", *words], cwd=tmp_path, env=ALONE, ranks=True, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 143, done.stdout + done.stderr
    report = summary(tmp_path / "outputs/run")
    assert (report["status"], report["exit_code"]) == ("stopped", 143)
    assert "stopped by signal 15" in done.stderr


# ---- terminals ---------------------------------------------------------------------------------------------------


def started(tmp_path, *before, **options):
    start = subprocess.Popen if before else forkserver.Popen
    return start([*before, sys.executable, "-m", "gpt2_fp8.run", *LONG], cwd=tmp_path, env=ALONE, **options)


def wait_for_steps(process, folder):
    until = time.monotonic() + 300
    while not (folder / "metrics.csv").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_hangup_and_quit_end_as_sigterm_does(tmp_path, number):
    process = started(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_steps(process, tmp_path / "outputs/run")
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 143, output
    assert "stopped by signal 15" in output  # in a wait for data without "stopping and saving" before it
    report = summary(tmp_path / "outputs/run")
    assert (report["status"], report["exit_code"]) == ("stopped", 143)
    assert checkpoint(tmp_path / "outputs/run", report["steps"]).is_dir()


def test_a_terminal_that_is_closed(tmp_path):
    """Whoever writes to it from then on gets an error: the progress bar, the log, the run's last word."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        words = [*LONG[:-1], "callbacks.progress_bar=true", LONG[-1], "data.num_workers=1"]
        os.execve(sys.executable, [sys.executable, "-m", "gpt2_fp8.run", *words], ALONE)
    threading.Thread(target=drain, args=(terminal,), daemon=True).start()
    until = time.monotonic() + 300
    while not (tmp_path / "outputs/run/metrics.csv").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 143
    report = summary(tmp_path / "outputs/run")
    assert report["status"] == "stopped"
    assert checkpoint(tmp_path / "outputs/run", report["steps"]).is_dir()


def drain(terminal):
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:
        pass


# ---- the benchmark -----------------------------------------------------------------------------------------------

BENCH = """
import os, signal, sys, time
from gpt2_fp8 import bench
def measure(*_):
    try:
        os.kill(os.getpid(), signal.{name})
        time.sleep({seconds})
        handle = 1
    finally:
        print(handle)
bench.measure = measure
sys.exit(bench.main(["bench.model=[tiny]", "bench.precision=[fp32]", "trainer=cpu"]))
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGHUP", 143)])
def test_a_signal_to_the_benchmark_is_what_it_ends_with(tmp_path, name, code):
    """Also where what it has interrupted fails for that."""
    (tmp_path / "script.py").write_text(BENCH.format(name=name, seconds=60))
    done = forkserver.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=ALONE, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, "stopped"), done.stderr
    assert "Traceback" not in done.stderr

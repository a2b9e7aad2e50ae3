"""Children that answer, fail, crash and hang; whatever they do, nothing of them stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt2_fp8.measure.case import run_child as run

ANSWERS = "import json, sys; json.dump({'asked': json.load(sys.stdin)}, open(sys.argv[1], 'w'))"
# starts a child of its own, writes both ids, and hangs
HANGS = """
import os, subprocess, sys, time
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("ids.tmp", "w").write(f"{os.getpid()} {below.pid}")
os.rename("ids.tmp", "ids")
time.sleep(600)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module of a text, which a child can run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}")

    def make(text):
        (tmp_path / "scratch.py").write_text(text)
        return "scratch"

    return make


def ids():
    for _ in range(600):
        if Path("ids").exists():
            return [int(word) for word in Path("ids").read_text().split()]
        time.sleep(0.1)
    raise AssertionError("the child did not start")


def gone(pid):
    """Whether a process has ended, or ends within a minute."""
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def from_ready(monkeypatch):
    """A child's time begins when it has written `ids`: how long it takes to start is the machine's affair."""
    wait = subprocess.Popen.wait

    def from_then_on(self, timeout=None):
        if timeout is not None:
            ids()
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", from_then_on)


def test_an_answer(module):
    ended = run(module(ANSWERS), {"a": [1, None]}, 60)
    assert (ended.status, ended.answer) == ("ok", {"asked": {"a": [1, None]}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ValueError('a  reason')", "ValueError: a reason"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import sys; sys.exit(7)", "ended with exit code 7 and without a word"),
        ("import sys; open(sys.argv[1], 'w').write('[1,'); sys.exit('half')", "half"),
    ],
)
def test_a_failure_is_one_line(text, message, module, tmp_path):
    ended = run(module(text), {}, 60, tmp_path / "log")
    assert (ended.status, ended.answer, ended.message) == ("failed", None, message)
    assert (tmp_path / "log").exists()


@pytest.mark.usefixtures("from_ready")
def test_a_hang_ends_with_all_its_children(module):
    ended = run(module(HANGS), {}, 1)
    assert (ended.status, ended.message) == ("timed out", "took longer than 1 seconds")
    assert all(map(gone, ids()))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_when_the_parent_ends_so_do_they(signum, module):
    name = module(HANGS)
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"from gpt2_fp8.measure.case import run_child as run; run({name!r}, 1, 600)"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    children = ids()
    os.kill(parent.pid, signum)
    assert parent.wait(60) == -signum
    assert all(map(gone, children))

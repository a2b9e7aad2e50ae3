"""A forked program is to its author what `python WORDS` is."""

import signal
import subprocess

import pytest

from tests.forkserver import python

SAYS = "import os, sys; print(__name__, sys.argv, os.getcwd(), sys.stdin.read()); sys.path.index(sys.path[0])"


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(f"import beside\n{SAYS}")
    (tmp_path / "beside.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "argv0"), [(["-c", SAYS], "-c"), (["program.py"], "{}/program.py"), (["-m", "program"], "{}/program.py")]
)
def test_it_has_its_name_words_folder_and_streams(program, words, argv0):
    done = python(*words, "one", cwd=program, given="two")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"__main__ {[argv0.format(program), 'one']} {program} two\n"


@pytest.mark.parametrize(
    ("code", "ended", "said"),
    [
        ("pass", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit, os; atexit.register(os.write, 2, b'bye')", 0, "bye"),
    ],
)
def test_it_ends_as_an_interpreter_does(tmp_path, code, ended, said):
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == ended
    assert done.stderr.endswith(said)
    assert said or not done.stderr


def test_it_is_new_and_has_torch(tmp_path):
    code = "import sys; print('torch' in sys.modules, 'gpt2_fp8.run' in sys.modules); import torch; torch.mark = 1"
    for _ in range(2):
        assert python("-c", f"{code}; print(vars(torch).get('mark2'))", cwd=tmp_path).stdout == "True False\nNone\n"
        python("-c", "import torch; torch.mark2 = 2", cwd=tmp_path)


def test_variables_that_are_read_late_are_its_own(tmp_path):
    done = python("-c", "import os, tempfile; print(os.environ['HOME'], tempfile.gettempdir())", cwd=tmp_path,
                  HOME="/nowhere", TMPDIR=str(tmp_path))  # fmt: skip
    assert done.stdout == f"/nowhere {tmp_path}\n"


def test_variables_that_a_library_has_read_already_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot have its own PYTHONUTF8: start one by `runs\.command`"):
        python("-c", "pass", cwd=tmp_path, PYTHONUTF8="1")


def test_one_that_hangs_is_ended_and_says_where(tmp_path):
    code = "import time\ndef hang():\n    time.sleep(60)\nhang()"
    with pytest.raises(subprocess.TimeoutExpired) as ended:
        python("-c", code, cwd=tmp_path, timeout=2)
    assert "in hang" in str(ended.value.stderr)

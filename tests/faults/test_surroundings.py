"""Faults 97, 98, 100 and 101: temporary files, the locale, and limits of the shell that a run is started from."""

import fcntl
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from gpt2_fp8.runtime import output, spool
from gpt2_fp8.runtime.spool import Spool
from tests import forkserver
from tests.data.hub_runs import ROOT
from tests.runs import SMALL, command, forked, metrics, summary

PLAIN = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """This process's temporary folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


# ---- 97: what a kill leaves ------------------------------------------------------------------------------------------


def spools(folder):
    return sorted(path.name for path in folder.glob("gpt2_fp8-*"))


def test_97_a_run_clears_what_a_killed_group_left(tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = os.environ | PLAIN | {"TMPDIR": str(folder)}
    words = [sys.executable, "-m", "gpt2_fp8.run", *SMALL, "data.num_workers=2", "trainer.max_steps=1000000"]
    process = forkserver.Popen([*words, "run_name=killed"], cwd=tmp_path, env=environment, start_new_session=True,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        until(lambda: list(folder.glob(f"{spool.PREFIX}*/*.npz")))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert len(spools(folder)) == 1
    done = forked(*SMALL, "run_name=next", cwd=tmp_path, TMPDIR=str(folder), **PLAIN)
    assert done.returncode == 0, done.stderr
    assert spools(folder) == []


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_97_what_a_living_process_owns_stays(temporary):
    with Spool() as mine:
        code = "import sys, tempfile; tempfile.tempdir = sys.argv[1]; from gpt2_fp8.runtime import spool; spool.clear()"
        subprocess.run([sys.executable, "-c", code, str(temporary)], check=True, env=os.environ | PLAIN)
        assert mine.is_dir()
        spool.clear()
        assert mine.is_dir()
    assert spools(temporary) == []


def test_97_nothing_else_is_touched(temporary, tmp_path, monkeypatch):
    (tmp_path / "precious").mkdir()
    (temporary / f"{spool.PREFIX}link").symlink_to(tmp_path / "precious")
    (temporary / f"{spool.PREFIX}file").write_text("")
    (temporary / "gpt2_fp8-abcdefgh").mkdir()  # of an earlier version, which held no lock
    (temporary / f"{spool.PREFIX}left").mkdir()
    spool.clear()
    assert spools(temporary) == ["gpt2_fp8-abcdefgh", f"{spool.PREFIX}file", f"{spool.PREFIX}link"]
    assert (tmp_path / "precious").is_dir()
    (temporary / f"{spool.PREFIX}theirs").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    spool.clear()
    assert (temporary / f"{spool.PREFIX}theirs").is_dir()


def test_97_one_that_is_cleared_before_it_is_locked_is_made_again(temporary, monkeypatch):
    flock, taken = fcntl.flock, []

    def cleared_meanwhile(descriptor, how):
        if not taken:
            taken.append(spools(temporary))
            (temporary / taken[0][0]).rmdir()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", cleared_meanwhile)
    with Spool() as made:
        assert made.is_dir()
        assert [made.name] != taken[0]


def test_97_without_locks_nothing_is_cleared(temporary, monkeypatch):
    def unsupported(*_):
        raise OSError(38, "no locks here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with Spool() as mine:
        spool.clear()
        assert mine.is_dir()


# ---- 98: a temporary folder that is full, or none --------------------------------------------------------------------

FULL = """
import resource, sys
from gpt2_fp8.data import worker_process

def run(connection, reader, spool):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))
    worker_process.run(connection, reader, spool)

if __name__ == "__main__":
    from gpt2_fp8 import run as program
    from gpt2_fp8.data import worker_handle
    worker_handle.run = run
    sys.exit(program.main(sys.argv[1:]))
"""


def test_98_tokens_that_find_no_room_are_read_again_by_the_run_itself(tmp_path):
    """The limit on files is that of the workers alone, as if their folder were full."""
    (tmp_path / "script.py").write_text(FULL)
    found = []
    for program in (["script.py"], ["-m", "gpt2_fp8.run"]):
        words = [*SMALL, f"run_name={len(found)}", "data.num_workers=2", "trainer.max_steps=6"]
        done = forkserver.python(*program, *words, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(metrics(tmp_path / "outputs" / str(len(found)))["train_loss"])
        lost = done.stdout.count("the workers' temporary folder loses tokens")
        assert lost == (1 if program == ["script.py"] else 0)
    assert "File too large; TMPDIR=FOLDER names another" in (tmp_path / "outputs/0/run.log").read_text()
    assert found[0] == found[1], "the same text in the same order"


def test_98_no_temporary_folder_at_all_is_refused(tmp_path):
    code = (
        "import sys, tempfile\n"
        "if __name__ == '__main__':\n"
        "    tempfile._candidate_tempdir_list = lambda: ['/nowhere']\n"
        "    from gpt2_fp8 import run\n"
        "    sys.exit(run.main(sys.argv[1:]))\n"
    )
    (tmp_path / "script.py").write_text(code)
    done = forkserver.run([sys.executable, "script.py", *SMALL, "data.num_workers=2", "run_name=a"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=300, env=os.environ | PLAIN)  # fmt: skip
    assert done.returncode == 2, done.stderr
    first, second = done.stderr.splitlines()
    assert first.startswith("error: a temporary folder is needed: No usable temporary directory")
    assert "TMPDIR=FOLDER" in second
    assert done.stdout == ""


# ---- 100: names ------------------------------------------------------------------------------------------------------

LOCALES = {
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0"},
    "POSIX": {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "an ASCII terminal": {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
}


@pytest.fixture
def latin1(tmp_path):
    """What makes Latin-1 the locale's encoding."""
    if shutil.which("localedef") is None:
        pytest.skip("no localedef")
    (tmp_path / "locales").mkdir()
    made = tmp_path / "locales/de_DE.ISO-8859-1"
    done = subprocess.run(["localedef", "-i", "de_DE", "-f", "ISO-8859-1", made], capture_output=True, text=True)
    if not made.exists():
        pytest.skip(f"localedef: {done.stderr}")
    return {"LOCPATH": str(made.parent), "LC_ALL": made.name}


def test_100_a_locale_of_another_encoding_is_none_of_ours(tmp_path, latin1):
    (tmp_path / "größe.txt").write_text("größe\n" * 3000, encoding="utf-8")
    files = ["data=text_files", "data.tokenizer=bytes", 'data.train_files=["größe.txt"]']
    done = command(*SMALL, 'run_name="größe"', *files, cwd=tmp_path, PYTHONUTF8="", **latin1, **PLAIN)
    assert done.returncode == 0, done.stderr
    assert "outputs/größe" in (tmp_path / "outputs/größe/run.log").read_text(encoding="utf-8")


def test_100_a_folders_own_name_is_escaped_wherever_it_is_told(tmp_path):
    folder = tmp_path / "w\x1b[31m\x9b\x07X"
    folder.mkdir()
    broken = folder / "outputs/run/checkpoints/step-00000012/model.safetensors"
    for words in (["run_name=run"], ["run_name=run", "trainer.max_steps=16", "ckpt_path=last"], ["seed=x"]):
        done = forked(*SMALL, *words, cwd=folder)
        assert done.returncode == (0 if "run_name=run" in words else 2), done.stderr
        shown = done.stdout + done.stderr
        if "run_name=run" in words:
            shown += (folder / "outputs/run/run.log").read_text(encoding="utf-8")
            assert "w\\x1b[31m\\x9b\\x07X/outputs/run" in shown
        assert not set(shown) & {"\x1b", "\x9b", "\x07"}
        if broken.exists():
            broken.write_bytes(b"")


def test_100_a_lines_format_keeps_its_own_colours(monkeypatch):
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("\x1b[1m%(message)s\x1b[0m"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    output.forgive_outputs()
    output.forgive_outputs()
    try:
        raise ValueError("\x1b[5m")
    except ValueError:
        logging.getLogger().error("a\x1b[31m %s\n\tb", "c\r", exc_info=True)
    first, second, *rest = handler.stream.getvalue().split("\n")
    assert (first, second) == ("\x1b[1ma\\x1b[31m c\\r", "\tb\x1b[0m")
    assert rest[-2:] == ["ValueError: \\x1b[5m", ""]


@pytest.mark.parametrize("locale", LOCALES)
def test_100_names_are_utf8_in_every_locale(tmp_path, locale):
    for file in ("größe.txt", "größe.jsonl"):
        (tmp_path / file).write_text('{"text": "größe"}\n' * 3000, encoding="utf-8")
    (tmp_path / "mine/experiment").mkdir(parents=True)
    settings = "# @package _global_\n# größe\ncallbacks:\n  sample_prompt: größe\n"
    (tmp_path / "mine/experiment/e.yaml").write_text(settings, encoding="utf-8")
    files = 'data.train_files=["größe.txt","größe.jsonl"]'
    done = command(
        "-cd", "mine", *SMALL, 'run_name="größe"', "experiment=e", "data=text_files", "data.tokenizer=bytes", files,
        "data.num_workers=1", "callbacks.sample_tokens=2", cwd=tmp_path, **LOCALES[locale], **PLAIN,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs/größe"
    assert summary(folder)["status"] == "completed"
    log = (folder / "run.log").read_text(encoding="utf-8")
    assert "outputs/größe" in log
    assert "sample at step 12: 'größe" in log
    assert "größe" in (folder / ".hydra/overrides.yaml").read_text(encoding="utf-8")
    assert "Logging error" not in done.stderr


def test_100_a_mistake_is_told_with_its_name(tmp_path):
    done = command("run_name=x", 'data.train_files=["größe.txt"]', "data=text_files", cwd=tmp_path, **LOCALES["C"])
    assert done.returncode == 2
    assert "größe.txt does not exist" in done.stderr


# ---- 101: ulimit -v --------------------------------------------------------------------------------------------------


def test_101_an_address_space_too_small_for_torch_is_refused(tmp_path):
    words = [sys.executable, "-m", "gpt2_fp8.run", *SMALL, "run_name=a"]
    done = subprocess.run(["sh", "-c", 'ulimit -v 200000; exec "$@"', "sh", *words], cwd=tmp_path, capture_output=True,
                          text=True, timeout=300, env=os.environ | PLAIN)  # fmt: skip
    assert done.returncode == 2, done.stderr
    first, second = done.stderr.splitlines()[-2:]
    assert first.startswith("error: torch cannot be loaded into the 195 MiB that `ulimit -v` leaves: ")
    assert second.startswith("  fix: type `ulimit -v unlimited`")
    assert "Traceback" not in done.stderr


LIMITS = {  # in KiB
    "-v 500000": "torch cannot be loaded into the 488 MiB that `ulimit -v` leaves: ",
    "-d 100000": "torch cannot be loaded into the 97 MiB that `ulimit -d` leaves: it takes more",
}


@pytest.mark.parametrize("limit", LIMITS)
def test_101_a_limit_of_the_shell_is_to_be_lifted(tmp_path, limit):
    """No smaller model would fit either. numpy's page of advice is not for those who read this."""
    words = [sys.executable, "-m", "gpt2_fp8.run", *SMALL, "run_name=a"]
    done = subprocess.run(["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *words], cwd=tmp_path, capture_output=True,
                          text=True, timeout=300, env=os.environ | PLAIN | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 2, done.stderr
    first, second = done.stderr.splitlines()
    assert LIMITS[limit] in first
    assert second.startswith(f"  fix: type `ulimit {limit[:2]} unlimited` before the command")
    assert len(first) < 300
    assert summary(tmp_path / "outputs/a")["status"] == "refused"

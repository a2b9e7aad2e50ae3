"""Faults 92 to 95, 97: what a stranger, another user or a disk leaves in the places of a run's files."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.checkpoint import durable, lock, pointers
from gpt2_fp8.checkpoint.lock import RunLock
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.run_folder import FOLDERS, HYDRA, REPLACED, SWEEP, WRITTEN_TO
from gpt2_fp8.train.loggers import MetricsFile
from tests.data.hub_runs import ROOT
from tests.runs import SMALL, command, forked, summary, train

FILES = [*REPLACED, *WRITTEN_TO, "run.log", *(f".hydra/{name}" for name in HYDRA)]
# Every file of a run's folder that is there once it has ended, but checkpoints, which are folders of their own.
LEFT = {".hydra", "checkpoints", "tensorboard", "metrics.csv", "run.log", "summary.json"}


def refused(*words):
    with pytest.raises(UserError) as caught:
        compose.preflight([*SMALL, *words])
    return [problem.cause for problem in caught.value.problems]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("outputs/run")
    path.mkdir(parents=True)
    return path


# ---- 92: links -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, ".hydra", *FOLDERS])
def test_92_a_link_in_the_place_of_what_a_run_writes_is_refused(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to("/nowhere" if name == "run.log" else "..")
    (cause,) = refused("run_name=run")
    assert cause.startswith(f"outputs/run/{name}: it is a link")
    assert refused("run_name=run", "ckpt_path=last") == [cause]


def test_92_by_whatever_name(folder):
    (folder / "mine.log").symlink_to("/nowhere")
    (folder / "settings").mkdir()
    (folder / "settings/config.yaml").symlink_to("/nowhere")
    found = refused("run_name=run", "hydra.job.name=mine", "hydra.output_subdir=settings")
    assert [cause.partition(":")[0] for cause in found] == ["outputs/run/mine.log", "outputs/run/settings/config.yaml"]


@pytest.mark.parametrize("name", SWEEP)
def test_92_in_a_sweep_too(folder, name):
    (folder / name).symlink_to("/nowhere")
    (folder / "1").mkdir()
    (folder / "1/run.log").symlink_to("/nowhere")
    found = {cause.partition(":")[0] for cause in refused_sweep()}
    assert found == {f"outputs/run/{name}", "outputs/run/1/run.log"}


def refused_sweep():
    with pytest.raises(UserError) as caught:
        compose.preflight(["-m", *SMALL, "run_name=run", "seed=1,2"])
    return [problem.cause for problem in caught.value.problems]


def test_92_the_whole_run_may_be_reached_by_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    Path("outputs").symlink_to("elsewhere")
    compose.preflight([*SMALL, "run_name=run"])


def test_92_nothing_that_is_written_later_goes_through_a_link(tmp_path):
    """Planted after the check: by each of the ways in which a run opens a file of its own."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    planted = [".lock", ".summary.json.tmp", "metrics.csv", "metrics.csv.tmp", ".bench.md.tmp"]
    for name in planted:
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(UserError, match=r"\.lock: it is a link"), RunLock(tmp_path):
        pass
    durable.write_json(tmp_path / "summary.json", {})
    MetricsFile(tmp_path, 3).log_metrics({"train_loss": 1.0}, step=4)
    durable.write_text(tmp_path / "bench.md", "")  # as `measure/record.py` does
    assert precious.read_text() == "precious"
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "step,train_loss"
    assert json.loads((tmp_path / "summary.json").read_text()) == {}


def test_92_a_run_writes_nothing_that_is_not_looked_for(tmp_path):
    done = forked(*SMALL, "hydra.run.dir=run", "trainer.max_steps=2", "logger=default", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == LEFT
    known = {Path(name).parts[0] for name in [*FILES, *FOLDERS]}
    assert known >= LEFT
    inside = {path.name for path in (tmp_path / "run/tensorboard").iterdir() if "tfevents" not in path.name}
    assert inside == {"hparams.yaml", "train", "val"}
    assert {path.name for path in (tmp_path / "run/.hydra").iterdir()} == set(HYDRA)


# ---- 93: odd things --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a folder", "a pipe"])
@pytest.mark.parametrize("name", FILES)
def test_93_a_folder_or_a_pipe_in_the_place_of_a_file_is_refused(folder, name, kind):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).mkdir() if kind == "a folder" else os.mkfifo(folder / name)
    (cause,) = refused("run_name=run")
    assert cause.startswith(f"outputs/run/{name}: it is {'a folder' if kind == 'a folder' else 'no regular file'}")


@pytest.mark.parametrize("name", [".hydra", *FOLDERS])
def test_93_a_file_in_the_place_of_a_folder_is_refused(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    (cause,) = refused("run_name=run")
    assert cause.startswith(f"outputs/run/{name}: it is a file")


def test_93_all_at_once_and_before_anything_is_written(folder):
    (folder / ".lock").mkdir()
    os.mkfifo(folder / "run.log")
    done = command(*SMALL, "run_name=run", cwd=Path.cwd())
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0] == "error: outputs/run/.lock: it is a folder, where a run writes a file"
    assert lines[2] == "error: outputs/run/run.log: it is no regular file, where a run writes a file"
    assert lines[1] == lines[3] == "  fix: remove it; hydra.run.dir=FOLDER puts a whole run elsewhere"
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "run.log"]


@pytest.mark.parametrize("what", ["mkdir", "mkfifo"])
def test_93_what_stands_in_a_pointers_way_is_put_aside(tmp_path, what):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    getattr(os, what)(tmp_path / "run/checkpoints/last.json")
    getattr(os, what)(tmp_path / "run/checkpoints/.last.json.tmp")
    train(tmp_path / "run", "trainer.max_steps=4")
    assert pointers.follow(tmp_path / "run/checkpoints", "last").step == 4


@pytest.mark.parametrize("what", ["mkdir", "mkfifo", "symlink"])
def test_93_a_log_that_something_takes_the_place_of_costs_no_checkpoint(tmp_path, what):
    """Somebody who tidies, in the midst of the run."""
    from gpt2_fp8.train.module import GPT2Module

    original = GPT2Module.training_step

    def training_step(self, batch, batch_idx):
        if self.global_step == 5:
            for name in ("metrics.csv", "metrics.csv.tmp"):
                path = tmp_path / "run" / name
                path.unlink(missing_ok=True)
                path.symlink_to("/nowhere") if what == "symlink" else getattr(os, what)(path)
        original(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT2Module, "training_step", training_step)
        train(tmp_path / "run", "callbacks.async_checkpoints=false")
    assert summary(tmp_path / "run")["exit_code"] == 0
    assert list(pointers.steps(tmp_path / "run/checkpoints")) == [10, 12]
    assert (tmp_path / "run/metrics.csv").read_text().splitlines()[-1].startswith("12,")


# ---- 94: what cannot be written --------------------------------------------------------------------------------------


def without_privileges(*words, cwd, before=""):
    """A command by somebody who is kept out by permissions, as root is not: root without its capabilities."""
    prefix = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    if prefix and not shutil.which("setpriv"):
        pytest.skip("root, and no setpriv to give up what root may do")
    script = f'{before} exec "$@"'
    return subprocess.run(
        [*prefix, "sh", "-c", script, "sh", sys.executable, "-m", "gpt2_fp8.run", *SMALL, *words],
        cwd=cwd, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize("name", [".lock", "run.log", ".hydra/config.yaml", "tensorboard/hparams.yaml"])
def test_94_a_file_of_another_user_is_refused(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    (folder / name).chmod(0o444)
    done = without_privileges("run_name=run", cwd=Path.cwd())
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2, f"error: outputs/run/{name}: it cannot be written: Permission denied",
    )  # fmt: skip
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", [".", ".hydra", "tensorboard", "checkpoints"])
def test_94_a_folder_of_another_user_is_refused(folder, name):
    (folder / name).mkdir(exist_ok=True)
    (folder / name).chmod(0o555)
    done = without_privileges("run_name=run", cwd=Path.cwd())
    assert done.returncode == 2
    assert "cannot be written: Permission denied" in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["theirs.txt", "theirs.jsonl"])
def test_94_a_data_file_that_may_not_be_read_is_refused(tmp_path, name):
    """Not left out in silence, among others that may be."""
    for file in ("mine.txt", "mine.jsonl", name):
        (tmp_path / file).write_text('{"text": "a text"}\n' * 100)
    (tmp_path / name).chmod(0)
    ending = name.partition(".")[2]
    words = ["data=text_files", "data.tokenizer=bytes", f'data.train_files=["*.{ending}"]']
    done = without_privileges(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: data.train_files: {name} cannot be read: Permission denied\n  fix: ")


@pytest.mark.parametrize("mask", ["777", "277", "400"])
def test_94_a_umask_that_keeps_the_owner_out_is_refused(tmp_path, mask):
    done = without_privileges("run_name=run", cwd=tmp_path, before=f"umask {mask};")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0].startswith(f"error: the umask 0{mask} keeps the owner out of the files")
    assert not list(tmp_path.iterdir())


def test_94_what_only_hydra_finds_is_said_in_two_lines(tmp_path):
    done = without_privileges("run_name=run", cwd=tmp_path, before="ulimit -f 1;")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "File too large" in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[1].startswith("  fix: ")
    assert "Traceback" not in done.stderr


def test_94_a_file_size_limit_that_no_checkpoint_fits_is_refused_at_the_start(tmp_path):
    done = without_privileges("hydra.run.dir=run", cwd=tmp_path, before="ulimit -f 64;")
    assert done.returncode == 2
    assert "ulimit -f" in done.stderr
    assert summary(tmp_path / "run")["status"] == "refused"


TINY = """
import ctypes, os, subprocess, sys
folder, options = sys.argv[1:3]
libc = ctypes.CDLL(None, use_errno=True)
user, group = os.geteuid(), os.getegid()
if libc.unshare(0x00020000 | (0x10000000 if user else 0)):
    sys.exit(77)
if user:
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
libc.mount(None, b"/", None, 1 << 14 | 1 << 18, None)  # what is mounted here is seen here alone
if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, options.encode()):
    sys.exit(77)
done = subprocess.run(sys.argv[3:])
for name in ("summary.json", "run.log"):
    if os.path.isfile(f"{folder}/run/{name}"):
        print(f"{name}:", open(f"{folder}/run/{name}").read())
sys.exit(done.returncode)
"""


@pytest.mark.parametrize(
    "options", ["nr_inodes=1", "nr_inodes=4", "nr_inodes=9", "nr_inodes=14", "size=4k", "size=16k"]
)
def test_94_no_byte_or_inode_free_is_said_at_the_start(tmp_path, options):
    disk = tmp_path / "disk"
    disk.mkdir()
    words = [sys.executable, "-m", "gpt2_fp8.run", *SMALL, f"hydra.run.dir={disk}/run", "logger=default"]
    mounted = [sys.executable, "-c", TINY, str(disk), options, *words]
    done = subprocess.run(mounted, cwd=tmp_path, text=True, timeout=300, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    if done.returncode == 77:
        pytest.skip("this machine lets nobody mount a small filesystem")
    assert done.returncode == 2, done.stderr
    first, second = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "  fix: "))][:2]
    assert "No space left on device" in first or " free" in first
    assert second.startswith("  fix: ")
    assert "Traceback" not in done.stderr


# ---- 95: a folder that turns read-only -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["unlink", "stat", "close"])
def test_95_the_lock_does_not_hide_the_runs_own_end(tmp_path, monkeypatch, code, call):
    class Own(Exception):
        pass

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    def end():
        with RunLock(tmp_path), monkeypatch.context() as patch:
            patch.setattr(lock.os, call, fail)
            raise Own

    with pytest.raises(Own):
        end()


SYNC = "callbacks.async_checkpoints=false"
READ_ONLY = """
import os, signal, sys
from gpt2_fp8 import run
from gpt2_fp8.train.module import GPT2Module

original = GPT2Module.training_step

def training_step(self, batch, batch_idx):
    if self.global_step == 5:
        for folder, _, _ in os.walk("run"):
            os.chmod(folder, 0o555)
        os.kill(os.getpid(), signal.SIGTERM)
    return original(self, batch, batch_idx)

GPT2Module.training_step = training_step
sys.exit(run.main(sys.argv[1:]))
"""


def test_95_a_run_that_is_ended_in_a_folder_that_has_turned_read_only_says_how(tmp_path):
    """The step of the signal cannot be saved: an error of its own, and no traceback of the lock's."""
    (tmp_path / "script.py").write_text(READ_ONLY)
    prefix = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    if prefix and not shutil.which("setpriv"):
        pytest.skip("root, and no setpriv to give up what root may do")
    words = [*prefix, sys.executable, "script.py", *SMALL, "hydra.run.dir=run", SYNC]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, timeout=300, env=environment)
    for folder, _, _ in os.walk(tmp_path / "run"):
        os.chmod(folder, 0o755)
    assert done.returncode == 143, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert list(pointers.steps(tmp_path / "run/checkpoints")) == [4, 5]

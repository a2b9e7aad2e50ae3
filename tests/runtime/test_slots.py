"""Places of jobs: no two have one, also after kills; and which GPUs there are."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from gpt2_fp8.runtime import slots


@pytest.fixture(autouse=True)
def asked_anew():
    """nvidia-smi is asked once in a process."""
    slots._listed.cache_clear()
    yield
    slots._listed.cache_clear()


def names(held):
    return [slot.name for slot in held]


def test_each_place_is_taken_once_and_given_back(tmp_path):
    held = [slots.take(["a", "b"], tmp_path) for _ in range(2)]
    assert names(held) == ["a", "b"]
    assert slots.take(["a", "b"], tmp_path) is None
    os.close(held[0].descriptor)
    again = slots.take(["b", "a"], tmp_path)
    assert again is not None
    assert again.name == "a"
    for slot in (again, held[1]):
        os.close(slot.descriptor)


def test_two_lists_that_overlap_share_no_place(tmp_path):
    one, other = slots.take(["0", "1"], tmp_path), slots.take(["1", "0"], tmp_path)
    assert {one.name, other.name} == {"0", "1"}
    assert slots.take(["1"], tmp_path) is None
    for slot in (one, other):
        os.close(slot.descriptor)


def test_a_lock_whose_file_was_deleted_is_none(tmp_path, monkeypatch):
    """Somebody cleans the temporary folder between the opening and the lock: the next one would make a new file."""
    flock = slots.fcntl.flock

    def late(descriptor, how):
        next(tmp_path.glob("*.lock")).unlink()
        flock(descriptor, how)

    monkeypatch.setattr(slots.fcntl, "flock", late)
    assert slots.take(["a"], tmp_path) is None


SLEEPER = "import os, sys, time; os.set_inheritable(int(sys.argv[1]), False); {}; print(flush=True); time.sleep(100)"
WITH_CHILD = "__import__('subprocess').Popen([sys.executable, '-c', 'import time; time.sleep(100)'], close_fds=False)"


@pytest.mark.whole
@pytest.mark.parametrize("more", ["0", WITH_CHILD])
def test_a_place_is_free_when_its_job_is_killed_and_not_before(tmp_path, more):
    slot = slots.take(["a"], tmp_path)
    job = subprocess.Popen(
        [sys.executable, "-c", SLEEPER.format(more), str(slot.descriptor)],
        pass_fds=[slot.descriptor], stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    os.close(slot.descriptor)
    try:
        job.stdout.readline()
        assert slots.take(["a"], tmp_path) is None, "the job has it, although who started it has let go"
        job.kill()
        job.wait()
        again = slots.take(["a"], tmp_path)
        assert again is not None, "what the job has started does not have it"
        os.close(again.descriptor)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("0,1,2,3", ["0", "1", "2", "3"]), (" 3, 1 ", ["3", "1"]), ("GPU-a1,MIG-b2", ["GPU-a1", "MIG-b2"]),
        ("", []), ("-1", []), ("2,-1,3", ["2"]), ("NoDevFiles", ["NoDevFiles"]), ("1,1", ["1"]),
    ],
)  # fmt: skip
def test_cuda_visible_devices_says_which_gpus_there_are(visible, gpus):
    assert slots.gpus({"CUDA_VISIBLE_DEVICES": visible}) == gpus


LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-2f5d-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2f5d-2)
  MIG 1g.10gb     Device  0: (UUID: MIG-7c-8)
  MIG 1g.10gb     Device  1: (UUID: MIG-7c-9)
GPU 2: NVIDIA H200 (UUID: GPU-2f5d-3)
"""


def test_otherwise_the_driver_says_it():
    assert slots.named(LISTED) == {
        "GPU-2f5d-1": "GPU 0", "MIG-7c-8": "GPU 1 MIG 0", "MIG-7c-9": "GPU 1 MIG 1", "GPU-2f5d-3": "GPU 2",
    }  # fmt: skip
    assert slots.named("No devices found.\n") == {}


@pytest.mark.parametrize(
    ("names", "called"),
    [
        (["GPU-2f5d-3", "MIG-7c-8"], ["GPU 2", "GPU 1 MIG 0"]),
        (["MIG-7c-9", "GPU-ffff"], ["GPU 1 MIG 1", "GPU-ffff"]),  # of another machine
        (["GPU-2f5d"], ["GPU-2f5d"]),  # two begin so
        (["3", "1"], ["GPU 3", "GPU 1"]),
    ],
)
def test_people_are_told_the_numbers_of_nvidia_smi(names, called, monkeypatch):
    monkeypatch.setattr(slots.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, LISTED))
    assert slots.shown(names) == dict(zip(names, called, strict=True))


def test_locks_go_by_what_nvidia_smi_tells_apart(tmp_path, monkeypatch):
    """Where SLURM shows two jobs of a host one GPU each, both call theirs 0."""
    seen = LISTED.splitlines()
    held = []
    for line in (seen[0], seen[4].replace("GPU 2", "GPU 0"), seen[0]):
        slots._listed.cache_clear()
        told = subprocess.CompletedProcess([], 0, line + "\n")
        monkeypatch.setattr(slots.subprocess, "run", lambda *_, told=told, **__: told)
        held.append(slots.take(["0"], tmp_path, slots.devices(["0"])))
    assert [slot and slot.name for slot in held] == ["0", "0", None]
    assert slots.take(["GPU-2f5d-1"], tmp_path, slots.devices(["GPU-2f5d-1"])) is None, "the first one, by its name"
    for slot in held[:2]:
        os.close(slot.descriptor)


def test_a_name_that_nvidia_smi_does_not_list_stays(monkeypatch):
    monkeypatch.setattr(slots.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, LISTED))
    names = ["0", "1", "2", "7", "GPU-2f5d", "GPU-2f5d-3", "MIG-7c-8", "GPU-ffff"]
    same = {"0": "GPU-2f5d-1", "2": "GPU-2f5d-3", "GPU-2f5d-3": "GPU-2f5d-3", "MIG-7c-8": "MIG-7c-8"}
    assert slots.devices(names) == same, "1 is cut into parts, and CUDA chooses one"


@pytest.mark.parametrize(
    ("failure", "gpus"),
    [(FileNotFoundError(), []), (subprocess.CalledProcessError(9, "nvidia-smi"), []), (None, ["GPU-2f5d-1"])],
)
def test_a_machine_without_a_driver_has_none(failure, gpus, monkeypatch):
    def run(*_, **__):
        if failure:
            raise failure
        return subprocess.CompletedProcess([], 0, LISTED.splitlines()[0] + "\n")

    monkeypatch.setattr(slots.subprocess, "run", run)
    assert slots.gpus({}) == gpus


def test_the_folder_of_locks_is_this_users(tmp_path, monkeypatch):
    monkeypatch.setattr(slots.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = slots.shared_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        slots.shared_folder()

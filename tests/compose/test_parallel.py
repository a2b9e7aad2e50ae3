"""Sweeps whose jobs run at the same time: what is refused, what is decided, and the locks of GPUs."""

import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from gpt2_fp8.compose import preflight, sweeps
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime import gpu_locks
from tests.runtime.test_ranks import SRUN, TORCHRUN

JOBLIB = ("-m", "hydra/launcher=joblib", "seed=1,2,3")
LAUNCHER = {"_target_": "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"}


@pytest.fixture(autouse=True)
def four_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(gpu_locks.tempfile, "gettempdir", lambda: str(tmp_path))
    gpu_locks._uuids.cache_clear()
    yield
    gpu_locks._uuids.cache_clear()


def refused(*words):
    with pytest.raises(UserError) as told:
        preflight(list(words))
    (problem,) = told.value.problems
    return problem.cause


@pytest.mark.parametrize("words", [["trainer.devices=2"], ["trainer.num_nodes=2", "trainer.strategy=ddp"]])
def test_a_job_of_several_devices_is_refused(words):
    assert "each job has one GPU" in refused(*JOBLIB, "trainer=gpu", "micro_batch_size=8", *words)
    assert "starts each job once" in refused(*JOBLIB, "trainer=gpu", "trainer.max_restarts=1")
    assert len(preflight([*JOBLIB, "trainer=ddp"])) == 3, "every GPU is the one that a job sees"


@pytest.mark.parametrize(("variables", "words"), [(TORCHRUN, JOBLIB), (SRUN, ("hydra.mode=MULTIRUN", "seed=1,2"))])
def test_a_sweep_inside_several_ranks_is_refused(variables, words, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "-m in each of 8 processes" in refused(*words)
    assert preflight(["seed=1"]), "each run by itself, without -m"


@pytest.mark.parametrize(
    ("asked", "gpus", "at_once", "threads"),
    [
        ({}, "0,1,2,3", 4, 4), ({"n_jobs": 2}, "0,1,2,3", 2, 8), ({"jobs": 3}, "0,1,2,3", 3, 5), ({}, "", 10, 1),
        ({"accelerator": "cpu", "n_jobs": 32, "jobs": 40}, "0,1", 32, 1), ({"jobs": None}, "0,1", 2, 8),
    ],
)  # fmt: skip
def test_jobs_at_a_time_and_their_threads(asked, gpus, at_once, threads, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("joblib.cpu_count", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # to be put back
    del os.environ["OMP_NUM_THREADS"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    asked = {"n_jobs": -1, "jobs": 10, "accelerator": "auto"} | asked
    launcher = LAUNCHER | {"n_jobs": asked["n_jobs"]}
    config = OmegaConf.create({"hydra": {"launcher": launcher}, "trainer": {"accelerator": asked["accelerator"]}})
    OmegaConf.set_readonly(config, True)
    sweeps.begin_joblib(config, tmp_path, None if asked["jobs"] is None else [["seed=1"]] * asked["jobs"])
    assert (config.hydra.launcher.n_jobs, os.environ["OMP_NUM_THREADS"]) == (at_once, str(threads))
    assert ("GPU" in capsys.readouterr().out) == (gpus != "" and asked["accelerator"] != "cpu")


# ---- the locks -------------------------------------------------------------------------------------------------------


def test_each_gpu_is_taken_once_and_given_back():
    held = [gpu_locks.lock_gpu({"CUDA_VISIBLE_DEVICES": "0,GPU-8a/b"}) for _ in range(3)]
    assert [taken and taken[0] for taken in held] == ["0", "GPU-8a/b", None]
    with held[0][1]:
        pass
    again = [gpu_locks.lock_gpu({"CUDA_VISIBLE_DEVICES": "1,0"}) for _ in range(2)]
    assert [name for name, _ in again] == ["1", "0"]


def test_another_process_has_none_of_them_until_it_ends(tmp_path):
    code = (
        "import tempfile, sys; tempfile.tempdir = sys.argv[1]; from gpt2_fp8.runtime import gpu_locks; "
        "taken = gpu_locks.lock_gpu(); print(taken[0], flush=True); sys.stdin.read()"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=-1, stdout=-1, text=True, env=environment
    ) as other:
        assert other.stdout.readline() == "0\n"
        assert gpu_locks.lock_gpu({"CUDA_VISIBLE_DEVICES": "0"}) is None
        other.kill()
        other.wait()
    assert gpu_locks.lock_gpu({"CUDA_VISIBLE_DEVICES": "0"})[0] == "0"


@pytest.mark.parametrize(
    ("visible", "names"), [("2, 3", ["2", "3"]), ("", []), ("-1", []), ("0,-1,1", ["0"]), (None, ["0", "1"])]
)
def test_which_gpus_there_are(visible, names, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-aaa'\necho '1, GPU-bbb'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_locks.list_gpus(environment) == names
    if "0" in names:
        assert gpu_locks.lock_gpu(environment)[0] == "0"
        assert (tmp_path / f"gpt2_fp8-gpus-{os.geteuid()}/GPU-aaa.lock").exists(), "by its UUID"

"""Sweeps whose jobs run at the same time: what is refused before anything starts, and whether the advice works."""

import json
import os

import pytest
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf

from gpt2_fp8.compose import parallel, preflight
from gpt2_fp8.config.errors import JobError, UserError
from gpt2_fp8.runtime import signals, slots, sweep_room
from tests.runtime.test_ranks import SRUN, TORCHRUN

JOBLIB = ("-m", "hydra/launcher=joblib", "seed=1,2,3")
LAUNCHER = {"_target_": "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"}


@pytest.fixture(autouse=True)
def four_gpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")


def refused(*words):
    with pytest.raises(UserError) as told:
        preflight(list(words))
    (problem,) = told.value.problems
    return problem


@pytest.mark.parametrize("word", ["n_jobs=4", "n_jobs=1", "n_jobs=-1", "verbose=5"])
def test_what_joblib_may_be_told(word):
    assert len(preflight([*JOBLIB, f"hydra.launcher.{word}"])) == 3


@pytest.mark.parametrize("word", ["n_jobs=0", "n_jobs=-2", "n_jobs=5", "n_jobs=8"])
def test_a_number_of_jobs_that_there_is_no_room_for(word):
    problem = refused(*JOBLIB, f"hydra.launcher.{word}")
    assert f"hydra.launcher.{word}" in problem.cause
    assert "leave it out: -1, a job on each of 4 GPUs" in problem.remedy
    assert preflight(list(JOBLIB))
    if "4, or" in problem.remedy:
        assert preflight([*JOBLIB, "hydra.launcher.n_jobs=4"])


def test_more_jobs_than_gpus_on_the_cpu():
    assert len(preflight([*JOBLIB, "trainer=cpu", "hydra.launcher.n_jobs=8"])) == 3


@pytest.mark.parametrize(
    "word", ["backend=threading", "require=sharedmem", "timeout=5", "batch_size=2", "pre_dispatch=all", "mmap_mode=c"]
)
def test_a_key_of_joblibs_that_would_do_nothing(word):
    problem = refused(*JOBLIB, f"hydra.launcher.{word}")
    assert "only n_jobs and verbose" in problem.cause
    assert ("trainer.max_time" in problem.remedy) == word.startswith("timeout")


@pytest.mark.parametrize("words", [["trainer.devices=2"], ["trainer.num_nodes=2", "trainer.strategy=ddp"]])
def test_a_job_of_several_devices(words):
    problem = refused(*JOBLIB, "trainer=gpu", "micro_batch_size=8", *words)
    assert "each job has one GPU" in problem.cause


def test_every_gpu_is_the_one_that_a_job_sees():
    assert len(preflight([*JOBLIB, "trainer=ddp"])) == 3


@pytest.mark.parametrize(("variables", "launcher"), [(TORCHRUN, "torchrun"), (SRUN, "srun")])
@pytest.mark.parametrize("words", [JOBLIB, ("-m", "seed=1,2,3"), ("hydra.mode=MULTIRUN", "seed=1,2")])
def test_a_sweep_inside_several_ranks(variables, launcher, words, monkeypatch):
    with monkeypatch.context() as ranks:
        for name, value in variables.items():
            ranks.setenv(name, value)
        problem = refused(*words)
        assert f"-m in each of 8 processes of {launcher}: each would run the whole sweep" == problem.cause
        assert preflight(["seed=1"]), "each run by itself, without -m"
    assert preflight(list(JOBLIB))


# ---- what is decided when it begins ----------------------------------------------------------------------------------


def begun(capsys, jobs=10, sweeper=None, accelerator="auto", **launcher):
    """Return how many jobs run at a time and the threads of each, as they are decided, told and left for joblib."""
    hydra = {"launcher": LAUNCHER | {"n_jobs": -1} | launcher, "sweeper": sweeper or {}}
    config = OmegaConf.create({"hydra": hydra, "trainer": {"accelerator": accelerator}})
    OmegaConf.set_readonly(config, True)
    room = parallel.begin(config, None if jobs is None else [["seed=1"]] * jobs)
    try:
        entered = sweep_room.entered()
        assert entered == room.room, "what a worker finds"
    finally:
        room.close()
    assert sweep_room.entered() is None
    assert not room.room.folder.exists()
    plan = entered.plan
    assert config.hydra.launcher.n_jobs == plan.at_once
    said = capsys.readouterr().out
    assert said.startswith(f"sweep: {plan.at_once} job")
    assert ("GPU" in said) == bool(plan.gpus)
    return plan


@pytest.fixture
def cpus(monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("asked", "at_once", "threads"),
    [
        ({}, 4, 4), ({"n_jobs": 2}, 2, 8), ({"jobs": 3}, 3, 5), ({"jobs": 1}, 1, 16),
        ({"accelerator": "cpu"}, 10, 1), ({"accelerator": "cpu", "n_jobs": 32, "jobs": 40}, 32, 1),
        ({"accelerator": "cpu", "n_jobs": 2}, 2, 8), ({"jobs": None, "sweeper": {"n_jobs": 2}}, 2, 8),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("cpus")
def test_jobs_at_a_time_and_their_threads(asked, at_once, threads, capsys):
    plan = begun(capsys, **asked)
    assert (plan.at_once, plan.threads) == (at_once, threads)
    assert list(plan.gpus) == ([] if asked.get("accelerator") else ["0", "1", "2", "3"])


@pytest.mark.usefixtures("cpus")
def test_a_machine_without_gpus(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = begun(capsys, jobs=3)
    assert (plan.gpus, plan.at_once, plan.threads) == ({}, 3, 5)


def test_threads_that_were_chosen_stay(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config = OmegaConf.create({"hydra": {"launcher": LAUNCHER | {"n_jobs": 2}, "sweeper": {}}})
    parallel.begin(config, [[]] * 2).close()
    assert "; CPU threads of a job: 3 (OMP_NUM_THREADS)" in capsys.readouterr().out


# ---- the room --------------------------------------------------------------------------------------------------------


def test_a_job_on_the_cpu_takes_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(slots.tempfile, "gettempdir", lambda: str(tmp_path))
    room = sweep_room.Room(tmp_path, sweep_room.Plan({"0": "GPU 0", "1": "GPU 1"}, 2, 1, os.getpid()))
    held = [room.slot(on_cpu) for on_cpu in (False, True, True, False)]
    assert [slot.name for slot in held] == ["0", "CPU 0", "CPU 1", "1"]
    assert room.slot(False) is None
    other = sweep_room.Room(tmp_path / "other", room.plan)
    assert other.slot(False) is None, "another sweep of this machine"
    for slot in held:
        os.close(slot.descriptor)


def test_a_worker_is_told_to_stop_by_the_room_or_by_its_parents_end(tmp_path):
    room = sweep_room.Room(tmp_path, sweep_room.Plan({}, 1, 1, os.getpid()))
    assert room.stopped_by() is None
    room.stop(2)
    assert room.stopped_by() == 2
    orphan = sweep_room.Room(tmp_path / "gone", sweep_room.Plan({}, 1, 1, 2**22 + 1))
    assert orphan.stopped_by() == 15
    assert orphan.is_orphan()


def test_a_signal_reaches_the_room_and_interrupts_nothing(monkeypatch):
    with signals.handled() as handlers, handlers.at_once():
        room = sweep_room.OpenRoom({}, 1, 1, [])
        try:
            os.kill(os.getpid(), 2)
            for _ in range(100):
                if room.room.stopped_by():
                    break
                room._closing.wait(0.05)
            assert room.room.stopped_by() == 2
        finally:
            room.close()
        handlers.received = None


# ---- the log of a job ------------------------------------------------------------------------------------------------


def test_a_jobs_log_is_its_file_alone(tmp_path):
    setup_globals()
    handlers = {
        "console": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"},
        "file": {"class": "logging.FileHandler", "filename": f"{tmp_path}/run.log"},
    }
    root = {"level": "INFO", "handlers": ["console", "file"]}
    settings = OmegaConf.create({"job_logging": {"version": 1, "handlers": handlers, "root": root}, "verbose": ["a.b"]})
    plain, output = parallel.job_logging(settings, tmp_path / "x")
    assert plain["root"]["handlers"] == ["file"] == list(plain["handlers"])
    assert plain["loggers"] == {"a.b": {"level": "DEBUG"}}
    assert output == tmp_path / "run.log"
    del settings.job_logging.handlers.file
    settings.job_logging.root.handlers, settings.verbose = ["console"], True
    plain, output = parallel.job_logging(settings, tmp_path / "x")
    assert (plain["root"], output) == ({"level": "DEBUG", "handlers": ["console"]}, tmp_path / "x/run.log")
    assert json.dumps(plain)


def test_the_end_of_a_job_travels_whole():
    import pickle

    error = pickle.loads(pickle.dumps(JobError("refused", 2, "error: x\n  fix: y")))
    assert (error.status, error.exit_code, str(error)) == ("refused", 2, "error: x\n  fix: y")

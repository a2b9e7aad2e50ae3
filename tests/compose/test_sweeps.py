"""The sweeps of docs/sweeps, each by its own command."""

import csv
import json
import re
import shlex

import pytest
import yaml

from gpt2_fp8.compose import planned, preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.train.metrics_csv import COLUMNS
from tests.runs import SMALL, command, forked
from tests.test_readme import ROOT, RUN

FILES = sorted((ROOT / "docs/sweeps/experiment").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_sweep_composes_by_the_command_in_its_file(path, monkeypatch, tmp_path):
    (typed,) = re.findall(r"^#   (python .*)$", path.read_text(), re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    words = [word.replace("docs/sweeps", str(ROOT / "docs/sweeps")) for word in shlex.split(typed)[len(RUN) :]]
    jobs = preflight(words)
    assert [job.penalty.z_loss for job in jobs] == [0, 0.005, 0.01, 0.02, 0.05]
    assert {job.data.name for job in jobs} == {
        {"fineweb_edu": "fineweb"}.get(name := path.stem.removeprefix("penalty_"), name)
    }


def test_there_are_three():
    assert len(FILES) == 3


def test_histories_and_margins_are_one_command():
    words = "-m recipe=delayed recipe.amax_history_len=1,16,1024 recipe.margin=0,1"
    jobs = preflight(shlex.split(words))
    assert [(job.recipe.amax_history_len, job.recipe.margin) for job in jobs] == [
        (length, margin) for length in (1, 16, 1024) for margin in (0, 1)
    ]


def test_the_sweep_of_wandb_composes_as_its_agent_types_it():
    sweep = yaml.safe_load((ROOT / "docs/sweeps/wandb.yaml").read_text())
    command = [word for word in sweep["command"] if word not in ("${env}", "${args_no_hyphens}")]
    assert command[: len(RUN)] == RUN
    assert sweep["command"][-1] == "${args_no_hyphens}"
    for at in (0, -1):
        values = {
            key: options["values"][at] if "values" in options else options["max" if at else "min"]
            for key, options in sweep["parameters"].items()
        }
        (config,) = preflight([*command[len(RUN) :], *(f"{key}={value}" for key, value in values.items())])
        assert config.logger.wandb is not None
        assert (config.optim.lr, config.precision.name) == (values["optim.lr"], values["precision"])
    assert sweep["metric"]["name"] in COLUMNS


PARAMS = "hydra: {mode: MULTIRUN, sweeper: {params: {run_name: 's1,s2'}}}"
NAMED = {
    "run_name=z1,z2": "job 0 would be in outputs/z1",
    "run_name=z1,z1": "job 0 would be in outputs/z1",
    "run_name='a${seed}' seed=1,2": "job 0 would be in outputs/a1",
    "run_name='a${seed}' seed=1337,2": "job 1 would be in outputs/a2",
    "run_name=a/b,a model=tiny,gpt2 hydra.launcher.n_jobs=1 hydra/launcher=joblib": "job 0 would be in outputs/a/b",
    "run_name='${hydra:job.override_dirname}' seed=1,2": "only a job has what it is made of",
    "-cd mine experiment=a,b": "job 0 would be in outputs/of_a",
    "-cd mine experiment=swept": "job 0 would be in outputs/s1",
}


@pytest.mark.parametrize("line", NAMED)
def test_names_that_differ_are_refused_and_both_ways_out_are_taken(line, tmp_path, monkeypatch):
    """Each job would be in another folder, and the table of the sweep would have none of them."""
    if "joblib" in line:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="pip install hydra-joblib-launcher")
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": "run_name: of_a", "b": "run_name: of_b", "swept": PARAMS}.items():
        (tmp_path / "mine/experiment").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"mine/experiment/{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    with pytest.raises(UserError) as told:
        planned(["-m", *shlex.split(line)])
    (problem,) = told.value.problems
    assert problem.cause.startswith("run_name=")
    assert f"{NAMED[line]}; a sweep has one folder, for all jobs and their table" in problem.cause
    ours, theirs = problem.remedy.split("; for folders by the jobs' names add ")
    assert ours.startswith("run_name=NAME, and the jobs are outputs/NAME/0")
    once = [word for word in shlex.split(line) if not word.startswith("run_name")]
    folders = [folder for _, folder in planned(["-m", *once, "run_name=NAME"])]
    assert folders == [f"outputs/NAME/{number}" for number in range(len(folders))]
    jobs = planned(["-m", *shlex.split(line), *shlex.split(theirs)])
    assert len({folder for _, folder in jobs}) == len(jobs)
    assert all(folder.startswith(f"outputs/NAME/{config.run_name}") for config, folder in jobs)


@pytest.mark.parametrize("folder", ["outputs/q${seed}", "outputs/q${hydra:job.num}", "${hydra:runtime.choices.model}"])
def test_a_folder_of_the_sweep_that_only_a_job_has_is_refused(folder):
    with pytest.raises(UserError) as told:
        preflight(["-m", "seed=1,2", f"hydra.sweep.dir={folder}"])
    (problem,) = told.value.problems
    assert problem.cause.endswith("; a sweep has one folder, for all jobs and their table")
    assert problem.remedy.startswith("hydra.sweep.dir=outputs/NAME; ")
    assert preflight(["-m", "seed=1,2", "hydra.sweep.dir=outputs/NAME"])


@pytest.mark.parametrize("line", ["run_name='a${data.seed}' seed=1,2 data.seed=3", "run_name='a${now:%f}' seed=1,2"])
def test_a_name_that_is_made_of_others_and_the_same_for_all_jobs_is_taken(line):
    (above,) = {folder.rpartition("/")[0] for _, folder in planned(["-m", *shlex.split(line)])}
    assert above.startswith("outputs/a")


@pytest.mark.whole
def test_jobs_in_folders_by_their_names_are_in_the_table_and_are_continued(tmp_path):
    line = ["-m", *SMALL, "run_name=z1,z2", "hydra.sweep.dir=outputs/two", "hydra.sweep.subdir=${run_name}"]
    for more in (["trainer.max_steps=2"], ["trainer.max_steps=3", "ckpt_path=last"]):
        done = forked(*line, "optim.warmup_steps=1", *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    with (tmp_path / "outputs/two/sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["job"], row["steps"], row["status"]) for row in rows] == [
        ("z1", "3", "completed"),
        ("z2", "3", "completed"),
    ]


BEGUN = "optim.lr=1e-3,2e-3 precision=bf16,fp8_hybrid"


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """What Hydra has written of a sweep's jobs, of which the first has gone on once."""
    monkeypatch.chdir(tmp_path)
    rates = [(rate, precision) for rate in ("0.001", "0.002") for precision in ("bf16", "fp8_hybrid")]
    for number, (rate, precision) in enumerate(rates):
        words = [
            f"optim.lr={rate}",
            f"precision={precision}",
            "model=tiny",
            *(["ckpt_path=last"] if not number else []),
        ]
        folder = tmp_path / f"outputs/s/{number}/.hydra"
        folder.mkdir(parents=True)
        (folder / "overrides.yaml").write_text(yaml.safe_dump(words))


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "optim.lr=2e-3,1e-3 precision=bf16,fp8_hybrid",
            "job 0 was optim.lr=0.001, and would go on as optim.lr=0.002, as 2 was",
        ),
        (
            "optim.lr=1e-3,2e-3 precision=fp8_hybrid,bf16",
            "job 0 was precision=bf16, and would go on as precision=fp8_hybrid",
        ),
        (
            "optim.lr=2e-3 precision=bf16,fp8_hybrid",
            "job 0 was optim.lr=0.001, and would go on as optim.lr=2e-3, as 2 was",
        ),
    ],
)
def test_a_job_that_would_continue_another_jobs_run_is_refused(line, told):
    with pytest.raises(UserError) as error:
        preflight(["-m", "run_name=s", "model=tiny", "ckpt_path=last", *line.split()])
    assert told in error.value.problems[0].cause
    assert preflight(["-m", "run_name=t", "model=tiny", *line.split()]), "another name begins another sweep"


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
    "line",
    [
        BEGUN,
        f"{BEGUN} trainer.max_steps=400 notes=longer",
        "precision=bf16,fp8_hybrid optim.lr=1e-3",
        "optim.lr=5e-4,6e-4 precision=bf16,fp8_hybrid",  # rates that no job had
    ],
)
def test_a_sweep_goes_on_by_its_own_words_in_their_order(line):
    assert preflight(["-m", "run_name=s", "model=tiny", "ckpt_path=last", *line.split()])


@pytest.mark.whole
@pytest.mark.parametrize("word", ["notes=${seed}", "run_name=${hydra:job.num}_x"])
def test_a_word_that_is_made_of_others_is_in_the_table_as_each_job_has_it(tmp_path, word):
    """It was noted with the values that the sweep has without its jobs, and jobs of these words were "not run"."""
    short = [*SMALL, "trainer.max_steps=2", "optim.warmup_steps=1", "hydra.sweep.dir=outputs/s"]
    done = forked("-m", *short, "seed=1,2", word, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Sweep of 2 jobs: 2 completed\n" in done.stdout
    assert "warn" not in done.stderr.lower()


@pytest.mark.usefixtures("begun")
def test_a_job_that_was_refused_is_known_by_the_words_that_it_was_trained_with(tmp_path):
    """Hydra writes a job's words before its resume is refused."""
    job = tmp_path / "outputs/s/1"
    trained = yaml.safe_load((job / ".hydra/overrides.yaml").read_text())
    (job / "summary.json").write_text(json.dumps({"status": "completed", "overrides": trained}))
    (job / ".hydra/overrides.yaml").write_text(yaml.safe_dump(["optim.lr=0.005", *trained[1:]]))
    line = ["-m", "run_name=s", "model=tiny", "ckpt_path=last"]
    assert preflight([*line, *BEGUN.split()])
    with pytest.raises(UserError, match=r"job 1 was optim\.lr=0\.001, and would go on as optim\.lr=0\.002, as 3 was"):
        preflight([*line, "optim.lr=2e-3,1e-3", "precision=bf16,fp8_hybrid"])


@pytest.mark.whole
def test_a_sweep_whose_jobs_are_complete_is_refused_other_values_and_left_as_it_was(tmp_path):
    line = ["-m", *SMALL, "trainer.max_steps=2", "optim.warmup_steps=1", "run_name=s", "ckpt_path=last"]
    assert forked(*line, "precision=fp32,bf16", cwd=tmp_path).returncode == 0
    before = _contents(tmp_path / "outputs/s")
    done = forked(*line, "precision=fp32,fp8_hybrid", cwd=tmp_path)
    assert done.returncode == 2
    assert "precision.name was bf16 and is now fp8_hybrid" in done.stderr
    assert _contents(tmp_path / "outputs/s") == before
    seeds = forked(*line, "precision=fp32,bf16", "seed=5", cwd=tmp_path)
    assert seeds.returncode == 2, "nor a row of jobs that did not run"
    assert _contents(tmp_path / "outputs/s") == before


def _contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OPTUNA = shlex.split((ROOT / "docs/sweeps/optuna.txt").read_text())


@pytest.fixture
def optuna():
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install hydra-optuna-sweeper")


@pytest.mark.slow
@pytest.mark.usefixtures("optuna")
def test_the_sweep_of_optuna_composes():
    assert preflight(OPTUNA)


@pytest.mark.slow
@pytest.mark.usefixtures("optuna")
@pytest.mark.parametrize("together", [[], ["hydra/launcher=joblib", "hydra.sweeper.n_jobs=2"]], ids=["alone", "two"])
def test_optuna_searches_and_its_jobs_are_a_table(tmp_path, together):
    given = {word.partition("=")[0] for word in together} | {"hydra.sweeper.n_trials"}
    words = [word for word in OPTUNA if word.partition("=")[0] not in given]
    short = [*SMALL, "trainer.max_steps=3", "optim.warmup_steps=1", "trainer.val_check_interval=3"]
    done = command(*words, *together, *short, "hydra.sweeper.n_trials=4", "run_name=o", cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "outputs/o/sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["job"] for row in rows) == ["0", "1", "2", "3"]
    assert {row["status"] for row in rows} == {"completed"}
    rates = {float(row["optim.lr"]) for row in rows}
    assert len(rates) == 4
    assert all(3e-4 <= rate <= 3e-3 for rate in rates)
    assert {row.get("optim.weight_decay", "0.1") for row in rows} <= {"0.01", "0.1"}  # no column if all chose one
    found = yaml.safe_load((tmp_path / "outputs/o/optimization_results.yaml").read_text())
    assert found["best_value"] == pytest.approx(min(float(row["val_loss"]) for row in rows)), "what a job returns"
    assert ("sweep: 2 jobs at a time" in done.stdout) == bool(together)

"""The sweeps of docs/sweeps, each by its own command."""

import csv
import re
import shlex

import pytest
import yaml

from gpt2_fp8.compose import plan, preflight, read
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.train.loggers import is_known
from tests.runs import SMALL, command, forked
from tests.test_readme import ROOT, RUN

FILES = sorted((ROOT / "docs/sweeps/experiment").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_sweep_composes_by_the_command_in_its_file(path):
    (typed,) = re.findall(r"^#   (python .*)$", path.read_text(), re.MULTILINE)
    words = [word.replace("docs/sweeps", str(ROOT / "docs/sweeps")) for word in shlex.split(typed)[len(RUN) :]]
    jobs = preflight(words)
    assert [job.penalty.z_loss for job in jobs] == [0, 0.005, 0.01, 0.02, 0.05]
    assert {job.data.name for job in jobs} == {
        {"fineweb_edu": "fineweb"}.get(name := path.stem.removeprefix("penalty_"), name)
    }


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
    assert is_known(sweep["metric"]["name"])


@pytest.mark.parametrize(
    "line",
    [
        "run_name=z1,z2",
        "run_name='${hydra:job.override_dirname}' seed=1,2",
        "-cd mine experiment=a,b",
        "seed=1,2 hydra.sweep.dir='outputs/q${hydra:job.num}'",
        "seed=1,2 hydra.sweep.subdir=x",
    ],
)
def test_jobs_have_one_folder_above_them_and_one_each(line, tmp_path):
    """Otherwise the table of the sweep would have none of them, or one would replace another."""
    for name in ("a", "b"):
        (tmp_path / "mine/experiment").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"mine/experiment/{name}.yaml").write_text(f"# @package _global_\nrun_name: of_{name}\n")
    with pytest.raises(UserError, match=r"hydra\.sweep\.(sub)?dir"):
        plan(read(["-m", *shlex.split(line)]))


def test_the_sweep_of_a_file_is_run_and_its_values_may_be_typed(tmp_path):
    (tmp_path / "mine/experiment").mkdir(parents=True)
    text = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {optim.lr: '1e-3,2e-3', tags.x: 'a,b'}}}\n"
    (tmp_path / "mine/experiment/swept.yaml").write_text(text)
    jobs = preflight(["-cd", "mine", "experiment=swept"])
    assert [(job.optim.lr, job.tags["x"]) for job in jobs] == [(r, x) for r in (1e-3, 2e-3) for x in "ab"]
    jobs = preflight(["-cd", "mine", "experiment=swept", "optim.lr=5e-3", "+tags.x=c"])
    assert [(job.optim.lr, job.tags["x"]) for job in jobs] == [(5e-3, "c")]


@pytest.mark.parametrize("line", ["run_name='a${data.seed}' seed=1,2 data.seed=3", "run_name='a${now:%f}' seed=1,2"])
def test_a_name_that_is_made_of_others_and_the_same_for_all_jobs_is_taken(line):
    (above,) = {folder.rpartition("/")[0] for _, folder in plan(read(["-m", *shlex.split(line)])).jobs}
    assert above.startswith("outputs/a")


@pytest.mark.whole
def test_a_sweep_is_in_its_table_and_goes_on(tmp_path):
    """Its jobs' folders are by their names, and a word of each job is made of another key."""
    line = ["-m", *SMALL, "optim.warmup_steps=1", "run_name=z1,z2", "notes=${seed}"]
    line += ["hydra.sweep.dir=outputs/two", "hydra.sweep.subdir=${run_name}"]
    done = forked(*line, "trainer.max_steps=2", cwd=tmp_path, code=0)
    assert "Sweep of 2 jobs: 2 completed\n" in done.stdout
    assert "warn" not in done.stderr.lower()
    assert forked(*line, "trainer.max_steps=3", "ckpt_path=last", cwd=tmp_path).returncode == 0
    with (tmp_path / "outputs/two/sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["job"], row["steps"], row["status"]) for row in rows] == [
        (name, "3", "completed") for name in ("z1", "z2")
    ]


OPTUNA = shlex.split((ROOT / "docs/sweeps/optuna.txt").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("together", [[], ["hydra/launcher=joblib", "hydra.sweeper.n_jobs=2"]], ids=["alone", "two"])
def test_optuna_searches_and_its_jobs_are_a_table(tmp_path, together):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install hydra-optuna-sweeper")
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

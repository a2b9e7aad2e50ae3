"""The sweeps of docs/sweeps, each by its own command."""

import csv
import re
import shlex

import pytest
import yaml

from gpt2_fp8.compose import preflight
from gpt2_fp8.train.metrics_csv import COLUMNS
from tests.runs import SMALL, command
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

"""The sweeps of docs/sweeps, each by its own command."""

import re
import shlex

import pytest
import yaml

from gpt2_fp8.compose import preflight
from gpt2_fp8.train.metrics_csv import COLUMNS
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


@pytest.mark.slow
def test_the_sweep_of_optuna_composes():
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install hydra-optuna-sweeper")
    assert preflight(shlex.split((ROOT / "docs/sweeps/optuna.txt").read_text()))

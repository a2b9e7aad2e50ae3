"""What people who know Hydra type: each line does here what it does in Hydra's documentation."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path

import pytest

from gpt2_fp8 import run
from gpt2_fp8.compose import conf_dir, look_only, preflight
from gpt2_fp8.config import hydra_policy
from gpt2_fp8.config.errors import UserError
from tests.runs import SMALL, forked, summary
from tests.test_readme import SWEEPS, blocks

ALONE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
CHECKOUT = Path(__file__).resolve().parents[2]
GLOBAL = "# @package _global_\n"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, text):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def causes(*words):
    with pytest.raises(UserError) as told:
        preflight(list(words))
    return [problem.cause for problem in told.value.problems]


def remedies(*words):
    with pytest.raises(UserError) as told:
        preflight(list(words))
    return [problem.remedy for problem in told.value.problems]


# ---- the folder of a run as its current folder -------------------------------------------------------------------


def test_chdir_leaves_every_path_where_it_was_typed_on_all_ranks(tmp_path):
    for name in ("a", "b", "held_out"):
        write(f"text/{name}.txt", f"{name} rose is a rose is a rose.\n" * 200)
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "micro_batch_size=2"]
    text = ["data=text_files", "data.train_files=[text/?.txt]", "data.val_files=[text/held_out.txt]",
            "data.tokenizer=bytes", "data.num_workers=1", "data.cache_dir=cache", "data.val_sequences=8"]  # fmt: skip
    line = [*SMALL[1:], *two, *text, "hydra.job.chdir=true", "trainer.max_steps=4"]
    (tmp_path / "where.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "Path(os.environ['SEEN'], os.environ.get('LOCAL_RANK', '0')).write_text(os.getcwd())\n"
    )
    (tmp_path / "seen").mkdir()
    seen = {"SEEN": str(tmp_path / "seen")}
    done = forked(*line, "plugins=[where]", "run_name=first", cwd=tmp_path, **ALONE, **seen)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "outputs/first"
    assert {path.name: path.read_text() for path in (tmp_path / "seen").iterdir()} == {
        "0": str(folder),
        "1": str(folder),
    }
    assert (tmp_path / "cache").is_dir()
    assert not (folder / "cache").exists()
    start = "init_from=outputs/first/checkpoints/step-00000004"
    done = forked(*line, start, "run_name=second", cwd=tmp_path, **ALONE, **seen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(tmp_path / "outputs/second")["steps"] == 4


# ---- a configuration of one's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["-cd", "-cp", "--config-dir", "--config-path"])
def test_a_primary_configuration_that_begins_with_ours(flag):
    write("mine/small.yaml", "defaults:\n  - config\n  - override model: gpt2\n  - _self_\nseed: 7\n")
    for folder in ("mine", str(Path("mine").absolute())):
        (config,) = preflight([flag, folder, "-cn", "small", "optim.lr=0.5"])
        assert (config.seed, config.model.name, config.optim.lr) == (7, "gpt2", 0.5)
    assert "-cd" in look_only([flag, "mine", "-cn", "small", "--cfg", "job"])


@pytest.mark.parametrize("flag", ["-cd", "-cp"])
def test_without_that_line_the_remedy_is_to_add_it(flag):
    write("mine/alone.yaml", "seed: 7\n")
    (remedy,) = remedies(flag, "mine", "-cn", "alone")
    assert "begin alone.yaml with `defaults: [config, _self_]`" in remedy


@pytest.mark.parametrize("text", ["seed: 5\n", "defaults: [{model: gpt2}, _self_]\n"])
def test_only_what_such_a_file_lacks_is_said(text):
    write("mine/noline.yaml", text)
    (cause,) = causes("-cd", "mine", "-cn", "noline")
    assert "noline.yaml does not begin with this program's settings" in cause
    assert "hydra.help" not in str(causes("-cd", "mine", "-cn", "noline") + remedies("-cd", "mine", "-cn", "noline"))
    write("mine/noline.yaml", "defaults: [config, override model: gpt2, _self_]\nseed: 5\n")
    (config,) = preflight(["-cd", "mine", "-cn", "noline"])
    assert (config.model.name, config.seed) == ("gpt2", 5)


def test_a_configuration_in_a_refused_folder_is_there():
    write("mine/own.yaml", "defaults: [config, _self_]\n")
    write("mine/experiment/x.yaml", "a: [\n")
    (cause,) = causes("-cd", "mine", "-cn", "own")
    assert "x.yaml cannot be read" in cause
    told = causes("-cd", "mine", "-cn", "owm", "seed=x")
    assert [any(words in cause for cause in told) for words in ("x.yaml", "--config-name=owm", "seed=x")] == [True] * 3


def test_the_checkout_is_a_folder_of_settings(tmp_path):
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("conf", "tests", "docs", "gpt2_fp8", "pyproject.toml"):
        (copy / name).symlink_to(CHECKOUT / name)
    write(copy / "experiment/mine.yaml", f"{GLOBAL}seed: 11\n")
    write(copy / "outputs/x/.hydra/hydra.yaml", "hydra: {callbacks: {x: {_target_: os.mkdir}}}\n")
    write(copy / "build/lib/conf/config.yaml", "hydra: {job: {chdir: true}}\n")
    for folder in (".", str(copy)):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(copy)
            assert preflight(["-cd", folder, "experiment=mine"])[0].seed == 11
            assert preflight(["-cd", folder])[0].seed == 1337


def test_what_a_file_names_is_read_wherever_it_lies():
    write("mine/experiment/x.yaml", f"{GLOBAL}defaults: [/build/hidden]\n")
    write("mine/build/hidden.yaml", f"{GLOBAL}hydra: {{callbacks: {{x: {{_target_: os.mkdir}}}}}}\n")
    (cause,) = causes("-cd", "mine", "experiment=x")
    assert "build/hidden.yaml holds a hydra: node, and sets hydra.callbacks" in cause
    assert any("build/hidden.yaml" in cause for cause in causes("-cd", "mine", "+build=hidden"))


# ---- Hydra's own node in a file ----------------------------------------------------------------------------------


def test_a_files_hydra_node_sets_folders():
    write("mine/experiment/x.yaml", f"{GLOBAL}hydra:\n  run: {{dir: 'there/${{run_name}}'}}\n")
    write("there/taken/checkpoints/step-00000001/manifest.json", "{}")
    assert preflight(["-cd", "mine", "experiment=x", "run_name=free"])
    (cause,) = causes("-cd", "mine", "experiment=x", "run_name=taken")
    assert "there/taken already holds a run" in cause


def test_a_file_stores_a_sweep():
    write(
        "mine/experiment/search.yaml",
        f"{GLOBAL}hydra:\n  mode: MULTIRUN\n  sweep: {{dir: sweeps, subdir: '${{hydra:job.num}}_x'}}\n"
        "  sweeper:\n    params:\n      seed: 1,2\n      optim.lr: range(0.1,0.3,0.1)\n      model: tiny\n",
    )
    jobs = preflight(["-cd", "mine", "experiment=search"])
    assert [(config.seed, config.optim.lr) for config in jobs] == [(1, 0.1), (1, 0.2), (2, 0.1), (2, 0.2)]
    assert len(preflight(["-cd", "mine", "experiment=search", "seed=5"])) == 2
    assert len(preflight(["-cd", "mine", "experiment=search", "hydra.sweeper.params.seed='1,2,3'"])) == 6


def test_the_sweep_that_the_readme_stores():
    (text,) = blocks(SWEEPS, "yaml")
    write("mine/experiment/search.yaml", text)
    jobs = preflight(["-cd", "mine", "experiment=search"])
    assert [(config.seed, config.optim.lr) for config in jobs] == [(1, 1e-3), (1, 2e-3), (2, 1e-3), (2, 2e-3)]


def test_a_file_sets_levels(tmp_path):
    write("mine/experiment/x.yaml", f"{GLOBAL}hydra: {{job_logging: {{root: {{level: WARNING}}}}, verbose: [mine]}}\n")
    assert preflight(["-cd", "mine", "experiment=x"])
    write("mine/experiment/x.yaml", f"{GLOBAL}hydra: {{job_logging: {{root: {{level: LOUD}}}}}}\n")
    (cause,) = causes("-cd", "mine", "experiment=x")
    assert "the level LOUD is none of" in cause


CODE = {
    "{sweeper: {_target_: os.mkdir}}": "hydra.sweeper",
    "{sweeper: {params: {hydra.launcher: x}}}": "hydra.sweeper",
    "{job_logging: {root: {level: {(): os.mkdir}}}}": "hydra.job_logging",
    "{job_logging: {handlers: {console: {class: os.mkdir}}}}": "hydra.job_logging",
    "{job: {chdir: true}}": "hydra.job",
    "{run: {dir: x}, callbacks: {x: {_target_: os.mkdir}}}": "hydra.callbacks",
    "{launcher: {n_jobs: 2}}": "hydra.launcher",
}


@pytest.mark.parametrize("node", CODE)
def test_a_files_hydra_node_names_no_code(node):
    write("mine/experiment/x.yaml", f"{GLOBAL}hydra: {node}\n")
    (cause,) = causes("-cd", "mine", "experiment=x")
    assert f"holds a hydra: node, and sets {CODE[node]}" in cause


# ---- plug-ins of Hydra's -----------------------------------------------------------------------------------------

PLUGINS = [(group, name) for group, names in hydra_policy.PACKAGES.items() for name in names]


def installed(group, name):
    package = hydra_policy.PACKAGES[group][name].replace("-", "_")
    try:
        return importlib.util.find_spec(f"hydra_plugins.{package}") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(("group", "name"), PLUGINS)
def test_a_missing_plugin_is_named_with_its_package(group, name):
    if installed(group, name):
        pytest.skip("it is installed")
    (remedy,) = remedies(f"{group}={name}")
    assert f"pip install {hydra_policy.PACKAGES[group][name]};" in remedy
    write("mine/experiment/x.yaml", f"{GLOBAL}defaults: [{{override /{group}: {name}}}]\n")
    (remedy,) = remedies("-cd", "mine", "experiment=x")
    assert f"pip install {hydra_policy.PACKAGES[group][name]};" in remedy


@pytest.mark.parametrize(
    ("line", "jobs"),
    [
        ("hydra/launcher=joblib hydra.launcher.n_jobs=2 seed=1,2", 2),
        ("hydra/launcher=submitit_local hydra.launcher.timeout_min=5 seed=1,2", 2),
        ("hydra/sweeper=optuna optim.lr=interval(0.1,0.2) seed=choice(1,2,3) hydra.sweeper.n_trials=2", 3),
        ("hydra/job_logging=colorlog hydra/hydra_logging=colorlog seed=1,2", 2),
    ],
)
def test_an_installed_plugin_is_one_of_hydras_choices(line, jobs):
    for word in line.split():
        group, _, name = word.partition("=")
        if name in hydra_policy.PACKAGES.get(group, {}) and not installed(group, name):
            pytest.skip(f"needs {hydra_policy.PACKAGES[group][name]}")
    assert len(preflight(["-m", *line.split()])) == jobs


def test_a_file_chooses_an_installed_plugin_by_name():
    write("mine/experiment/x.yaml", f"{GLOBAL}defaults: [{{override /hydra/launcher: basic}}]\nseed: 3\n")
    assert preflight(["-cd", "mine", "experiment=x"])[0].seed == 3


def test_a_file_of_the_folder_is_no_plugin():
    write("mine/experiment/x.yaml", f"{GLOBAL}defaults: [{{override /hydra/launcher: evil}}]\n")
    write("mine/hydra/launcher/evil.yaml", "_target_: os.mkdir\n")
    assert len(causes("-cd", "mine", "experiment=x")) == 2


# ---- small things ------------------------------------------------------------------------------------------------


def test_log_levels(tmp_path):
    line = [*SMALL, "trainer.max_steps=2", "hydra.job_logging.root.level=WARNING", "run_name=x"]
    done = forked(*line, cwd=tmp_path, **ALONE)
    assert done.returncode == 0, done.stderr
    assert "steps " not in (tmp_path / "outputs/x/run.log").read_text()
    assert preflight(["+hydra.job_logging.loggers.mine.level=DEBUG", "hydra.hydra_logging.root.level=ERROR"])
    assert set(hydra_policy.LEVELS) <= set(logging.getLevelNamesMapping())


@pytest.mark.parametrize("word", ["experiment=null", "debug=null", "~experiment"])
def test_no_experiment(word):
    assert preflight([word])[0] != preflight(["experiment=tinyshakespeare_fp8"])[0]
    assert preflight([word])[0].model.name == "tiny"
    group = word.strip("~").partition("=")[0]
    choice = "fdr" if group == "debug" else "fineweb_edu_fp8"
    (last,) = preflight([word, f"{group}={choice}"] if "=" in word else [f"{group}={choice}"])
    assert last.trainer.fast_dev_run or last.data.name == "fineweb"
    (none,) = preflight([f"{group}={choice}", word])
    assert (none.trainer.fast_dev_run, none.data.name) == (False, "stdlib")
    assert look_only([word, "--cfg", "job"])[-1] == f"~{group}"


def test_a_group_left_out_is_its_choice_of_nothing():
    (config,) = preflight(["~logger", "~callbacks"])
    assert not config.logger.tensorboard
    assert not config.logger.csv
    assert config.callbacks == preflight(["callbacks=none"])[0].callbacks


def test_a_runs_name_from_hydra(monkeypatch, capfd):
    (config,) = preflight(["run_name=${hydra:job.override_dirname}", "seed=3", "model=tiny"])
    assert config.run_name == "model=tiny,seed=3"
    jobs = preflight(["-m", "run_name=${hydra:job.override_dirname}", "hydra.sweep.dir=s", "seed=1,2"])
    names = [job.run_name for job in jobs]
    assert names == ["seed=1", "seed=2"]
    (config,) = preflight(["run_name=${hydra:job.name}-${hydra:runtime.choices.model}"])
    assert config.run_name == "run-tiny"


def test_tags_and_notes():
    (config,) = preflight(["+tags.purpose=try", "+tags.round=3", "+tags.lr=0.5", "+tags.good=true", "notes='a, b'"])
    assert config.tags == {"purpose": "try", "round": 3, "lr": 0.5, "good": True}
    assert config.notes == "a, b"
    write("mine/experiment/x.yaml", f"{GLOBAL}tags: {{purpose: from a file}}\nnotes: |\n  two\n  lines\n")
    (config,) = preflight(["-cd", "mine", "experiment=x", "+tags.round=1"])
    assert config.tags == {"purpose": "from a file", "round": 1}
    assert config.notes == "two\nlines\n"
    assert causes("+tags.x=[1]", "+other.key=1") == [
        "there is no key other",
        "tags.x=[1]: must be a whole number, a number, true or false or text",
    ]
    assert remedies("tags.purpose=x") == ["+tags.purpose=x, to add it"]
    assert remedies("tags=x") == ["+tags.KEY=VALUE"]
    assert remedies("tags={purpose:x}") == ["+tags={purpose:x}, to add them"]
    assert preflight(["+tags={purpose:x}"])[0].tags == {"purpose": "x"}


def test_tags_and_notes_of_a_run_that_did_not_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(run.loading, "_imported", lambda: (_ for _ in ()).throw(MemoryError("no room")))
    assert run.main([*SMALL, "run_name=x", "+tags.purpose=try", "notes=why"]) == 1
    told = json.loads((tmp_path / "outputs/x/summary.json").read_text())
    assert (told["tags"], told["notes"]) == ({"purpose": "try"}, "why")


def test_every_problem_of_such_lines_comes_at_once():
    write("mine/experiment/x.yaml", f"{GLOBAL}seed: 3\n")
    told = causes("-cd", "mine", "experiment=x", "model=gpt3", "+tags.x=[1]", "seed.x=1", "+seed=2", "foo=1",
                  "hydra.launcher.n_jobs=2", "hydra/launcher=joblb", "plugins=[nope_]", "optim.lr=x")  # fmt: skip
    for words in ("model=gpt3", "tags.x=[1]", "seed is a single value", "seed has a value already", "no key foo",
                  "n_jobs", "hydra/launcher=joblb", "no module nope_", "optim.lr=x"):  # fmt: skip
        assert any(words in cause for cause in told), (words, told)


def test_our_files_are_not_a_users(tmp_path):
    """The program's own settings are not read as a stranger's, wherever they are."""
    assert preflight(["-cd", str(conf_dir().parent)])

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from gpt2_fp8.compose import conf_dir, help_text, look_only, preflight, read, to_run_config
from gpt2_fp8.config import own_words
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.keys import value_of

REPOSITORY = Path(__file__).resolve().parents[2]


def causes(*argv):
    with pytest.raises(UserError) as caught:
        preflight(list(argv))
    return [problem.cause for problem in caught.value.problems]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def run_by_hydra(monkeypatch, *argv):
    """What Hydra's own main composes for a command line, job by job."""
    seen = []
    monkeypatch.setattr(sys, "argv", ["run", *argv])
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(
        lambda cfg: seen.append(to_run_config(cfg, own_words.keys(argv)))
    )()
    return seen


SAME = [
    ["run_name=x", "optim.lr=1e-3", "data.cache_dir=c", "precision.keep_bf16=[head,blocks.0]", "++seed=3"],
    ["run_name=x", "model=gpt2", "optim=tiny", "experiment=fineweb_edu_fp8", "debug=profiler", "trainer=cpu"],
    ["run_name=x", "trainer.max_epochs=2", "global_batch_size=4"],
    ["run_name=x", "experiment=tinyshakespeare_fp8", "optim.lr=${optim.min_lr_ratio}"],
    ["-m", "run_name=x", "model=tiny,gpt2", "optim.lr=range(0.1,0.3,0.1)"],
    ["-m", "run_name=x", "experiment=glob(tiny*)", "precision.keep_bf16=[head],[]"],
    ["hydra.mode=MULTIRUN", "run_name=x", "precision=bf16,fp8_e4m3", "seed=7"],
    ["-m", "run_name=x_${hydra:job.num}", "hydra.sweep.dir=s", "seed=1,2"],
]


@pytest.mark.parametrize("argv", SAME, ids=" ".join)
def test_preflight_sees_what_hydra_will_run(argv, monkeypatch):
    assert preflight(argv) == run_by_hydra(monkeypatch, *argv)


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ("precision=fp8_hybrid", "auto"),
        ("recipe=delayed precision=fp8_e4m3", "delayed"),
        ("-cd mine experiment=e4m3", "auto"),
        ("-cd mine experiment=e4m3 recipe=block", "block"),
        ("-cd mine experiment=block", "block"),
    ],
)
def test_the_recipe_is_the_backends_unless_one_is_named(words, recipe, tmp_path):
    text = "# @package _global_\ndefaults:\n  - override /precision: fp8_e4m3\n"
    write(tmp_path / "mine/experiment/e4m3.yaml", text)
    write(tmp_path / "mine/experiment/block.yaml", text + "  - override /recipe: block\n")
    (config,) = preflight(words.split())
    assert config.recipe.name == recipe


def test_a_problem_of_many_jobs_is_said_once():
    said = [f"optim.lr=-{rate}.0: must be above 0" for rate in (1, 2)]
    assert causes("-m", "seed=1,2,3", "optim.lr=-1,-2") == said


def test_an_experiment_may_set_what_stands_at_the_top(tmp_path):
    write(tmp_path / "mine/experiment/mine.yaml", "# @package _global_\nseed: 7\nrun_name: from_file\n")
    (config,) = preflight(["-cd", "mine", "experiment=mine"])
    assert (config.seed, config.run_name) == (7, "from_file")
    (config,) = preflight(["hydra.searchpath=[mine]", "experiment=mine", "ckpt_path=last", "seed=8"])
    assert (config.seed, config.ckpt_path) == (8, "last")
    experiments = [*(conf_dir() / "experiment").glob("*.yaml"), "mine"]
    assert len(preflight(["-cd", "mine", "-m", "experiment=glob(*)", "run_name=x"])) == len(experiments)


def test_a_users_own_model(tmp_path, monkeypatch):
    """Three lines, as the page has it: the block is GPT-2's, the name its file's."""
    (text,) = re.findall(r"```yaml\n((?:.*\n){3})```", (REPOSITORY / "docs/models.md").read_text())
    write(tmp_path / "mine/model/small.yaml", text)
    assert "optim/small" in causes("-cd", "mine", "model=small")[0]
    argv = ["-cd", "mine", "model=small", "optim=tiny", "run_name=x"]
    (config,), (gpt2,) = preflight(argv), preflight(["model=gpt2"])
    assert config.model == replace(gpt2.model, name="small", n_layer=6, n_head=6, n_embd=384)
    assert run_by_hydra(monkeypatch, *argv) == [config]
    write(tmp_path / "mine/model/small.yaml", text + "n_layers: 3\n")
    assert causes("-cd", "mine", "model=small", "optim=tiny") == ["there is no key model.n_layers"]


EVIL = "x: {_target_: os.system, command: touch evil}"


@pytest.mark.parametrize("header", ["# @package _global_\nhydra:\n  callbacks:\n    ", "# @package hydra.callbacks\n"])
def test_code_that_a_file_names_is_not_called(header, tmp_path):
    write(tmp_path / "evil/experiment/evil.yaml", f"{header}{EVIL}\n")
    assert "os.system" in causes("-cd", "evil", "experiment=evil")[0]
    assert "os.system" in causes(f"hydra.searchpath=[file://{tmp_path}/evil]", "experiment=evil")[0]


@pytest.mark.parametrize(
    "line", ["--help", "-h", "seed=x --hydra-help", "--cfg job", "-c all seed=1", "--info", "-i plugins",
             "--shell-completion install=bash", "-sc query=bash"]
)  # fmt: skip
def test_help_is_hydras(line):
    assert read(line.split()).shows


def test_nothing_stays_behind():
    for argv in (["seed=1"], ["-m", "run_name=${hydra:job.num}x", "hydra.sweep.dir=s", "seed=1,2"]):
        preflight(argv)
        assert not GlobalHydra.instance().is_initialized()
        assert not HydraConfig.initialized()
    causes("model=nope")
    assert not GlobalHydra.instance().is_initialized()
    assert os.listdir() == []


PROBE = """
import json, sys
from gpt2_fp8.compose import conf_dir, preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.keys import value_of
try:
    preflight(json.loads(sys.argv[1]))
    told = 0
except UserError as error:
    told = len(error.problems)
heavy = [name for name in ("torch", "lightning", "transformer_engine", "datasets", "numpy") if name in sys.modules]
print(json.dumps([told, heavy, str(conf_dir())]))
"""


def probe(*argv, python=sys.executable, **options):
    done = subprocess.run(
        [python, "-c", PROBE, json.dumps(argv)], capture_output=True, text=True, check=True, **options
    )
    return json.loads(done.stdout)


def test_it_imports_nothing_heavy():
    told, heavy, _ = probe("model=gpt3", "seed=x", "batch_size=2")
    assert told == 3
    assert heavy == []


def test_help_says_what_there_is():
    text = help_text(read(["--help"]))
    for group in conf_dir().iterdir():
        if group.is_dir() and group.name != "hydra":  # Hydra lists its own groups by `--hydra-help`
            assert f"{group.name}: {', '.join(sorted(file.stem for file in group.glob('*.yaml')))}\n" in text
    assert " _" not in text, "what choices have in common is no choice"
    assert text.count("python -m gpt2_fp8.run") >= 6
    assert all(f"{code}: " in text for code in (0, 1, 2, 3, 4, 143))
    listed = tuple(f"{group.name}: " for group in conf_dir().iterdir())  # Hydra writes a group's choices in one line
    assert max(len(line) for line in text.splitlines() if not line.startswith(listed)) <= 120


@pytest.mark.slow
def test_a_wheel_carries_every_module_and_its_settings(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    copy = tmp_path / "source"
    ignore = "--exclude=./.git --exclude=./.venv"
    subprocess.run(
        f"mkdir {copy} && tar -C {REPOSITORY} {ignore} -cf - . | tar -C {copy} -xf -", shell=True, check=True
    )
    subprocess.run([*build, str(copy)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    told, _, folder = probe("model=gpt2", cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)})
    assert told == 0
    assert Path(folder) == site / "gpt2_fp8/conf"
    shipped = {path.relative_to(site) for path in site.rglob("*") if path.is_file()}
    ours = {path.relative_to(REPOSITORY) for path in (REPOSITORY / "gpt2_fp8").rglob("*") if path.is_file()}
    settings = {"gpt2_fp8" / path.relative_to(REPOSITORY) for path in conf_dir().rglob("*.yaml")}
    assert {path for path in ours if "__pycache__" not in path.parts} | settings <= shipped


WORDS = [
    ("+seed=3", "seed", 3),
    ("experiment=null", "seed", 1337),
    ("+experiment=tinyshakespeare_fp8", "data.name", "tinyshakespeare"),
    ("run_name=007", "run_name", "007"),
    ("notes=true", "notes", "true"),
    ("tags.a=1", "tags", {"a": 1}),
    ("logger=[default,wandb] logger.wandb.project=p", "logger.wandb.project", "p"),
    ("~callbacks", "callbacks.fp8_health", False),
    ("'precision.keep_bf16=[head, last]'", "precision.keep_bf16", ["head", "last"]),
    ("-cd mine experiment=mine", "optim.lr", 0.5),
]


@pytest.mark.parametrize(("line", "key", "value"), WORDS)
def test_a_word_is_taken_as_it_is_typed(line, key, value, tmp_path):
    write(tmp_path / "mine/experiment/mine.yaml", "# @package _global_\noptim: {lr: 0.5}\n")
    if "wandb" in line:
        pytest.importorskip("wandb")
    (config,) = preflight(shlex.split(line))
    assert value_of(config, key) == value


@pytest.mark.parametrize(
    "line", ["seed=abc", "optim.schedule=constant", "optim.lr=nan", "micro_batch_size=3", "data=mixture"]
)
def test_what_a_run_refuses_is_not_shown_as_its_configuration(line):
    words = line.split()
    with pytest.raises(UserError) as shown:
        look_only(read([*words, "--cfg", "job"]))
    with pytest.raises(UserError) as run:
        preflight(words)
    assert shown.value.problems == run.value.problems
    assert help_text(read([*words, "--help"]))

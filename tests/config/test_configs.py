"""Every file of conf/ composes, alone with partners that fit, and sets every key of the schema and no other."""

import re
from pathlib import Path

import pytest

from gpt2_fp8.compose import conf_dir, preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.keys import key_paths
from gpt2_fp8.config.schema import FP8PrecisionConfig, RunConfig
from tests.config.conf_files import inherited, merged, own

pytestmark = pytest.mark.whole  # each composes many times

GROUPS = sorted(path.name for path in conf_dir().iterdir() if path.is_dir())
FILES = [path.relative_to(conf_dir()) for path in sorted(conf_dir().glob("*/*.yaml"))]
BASES = [path.relative_to(conf_dir()) for path in sorted(conf_dir().glob("_*.yaml"))]  # what choices have in common
PARTNERS = {
    "data=text_files": ["data.train_files=[corpus.txt]"],
    "data=token_files": ["data.train_files=[corpus.bin]", "data.val_files=[corpus.bin]"],
    "data=hub": ["data.repo=a/b"],
    "data=mixture": ["+data@data.sources.a=fineweb", "+data@data.sources.b=openwebtext"],
    "trainer=ddp": [],
    "data=registered": ["plugins=[json]", "data.source=x"],
    "optimizer=registered": ["plugins=[json]", "optimizer.factory=x"],
    "recipe=registered": ["plugins=[json]", "recipe.factory=x"],
}
OTHER_WORDS = {"tensorwise": "current", "blockwise": "block"}  # for the same choice
REFUSED = {"precision=fp8_e5m2": "E5M2 x E5M2"}  # recipe=mxfp8 is refused only where the GPU cannot do it


def choice(file):
    return f"{file.parent}={file.stem}"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("corpus.txt", "corpus.bin"):
        Path(name).write_text("text")


def test_the_groups_are_those_of_the_schema():
    groups = {path.partition(".")[0] for path in key_paths(RunConfig) if "." in path}
    assert set(GROUPS) == groups | {"experiment", "debug", "hydra"}
    assert len(FILES) > 30, "no folder below a group"


@pytest.mark.parametrize("file", FILES, ids=choice)
def test_every_choice_composes(file):
    argv = [choice(file), *PARTNERS.get(choice(file), [])]
    if reason := REFUSED.get(choice(file)):
        with pytest.raises(UserError, match=reason):
            preflight(argv)
        return
    (config,) = preflight(argv)
    if file.parent.name in ("model", "precision", "recipe", "data", "optimizer"):
        assert getattr(config, file.parent.name).name == OTHER_WORDS.get(file.stem, file.stem), "the file's"


@pytest.mark.parametrize("model", [file.stem for file in FILES if file.parent.name == "model"])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])  # the others need what the first needs
def test_every_model_fits_every_fp8_recipe(model, recipe):
    (config,) = preflight([f"model={model}", f"recipe={recipe}"])
    assert isinstance(config.precision, FP8PrecisionConfig)


@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name in ("experiment", "debug")], ids=choice)
def test_experiments_and_debug_runs_compose_with_every_trainer(file):
    for trainer in ("cpu", "ddp"):
        preflight([choice(file), f"trainer={trainer}"])


def test_model_and_optim_come_in_pairs():
    names = {group: {file.stem for file in FILES if file.parent.name == group} for group in ("model", "optim")}
    assert names["model"] == names["optim"], "optim follows model by name"


def written(file):
    everywhere = "@package _global_" in (conf_dir() / file).read_text()
    prefix = "" if everywhere or file.parent == Path() else f"{file.parent}."
    return {f"{prefix}{key}" for key in merged(file)}


def test_conf_and_schema_name_the_same_keys():
    in_conf = set().union(*map(written, FILES), written(Path("config.yaml")))
    in_conf -= {"logger.wandb", "logger.mlflow"}  # null where nothing brings their keys
    assert in_conf == set(key_paths(RunConfig))


@pytest.mark.parametrize("group", ["trainer", "callbacks", "model", "optim"])
def test_the_choices_of_a_group_set_the_same_keys(group):
    files = [file for file in FILES if file.parent.name == group]
    assert len({frozenset(written(file)) for file in files}) == 1


@pytest.mark.parametrize("file", [*FILES, *BASES], ids=str)
def test_a_value_stands_once(file):
    above = inherited(file)
    assert [key for key, value in own(file).items() if key in above and above[key] == value] == []


@pytest.mark.parametrize("base", [file.stem for file in BASES])
def test_a_base_is_no_choice(base):
    group = base.split("_")[1]
    for words in ([f"{group}={base}"], [f"{group}=/{base}"], [f"{group}=../{base}"], ["-cn", base]):
        with pytest.raises(UserError) as caught:
            preflight(words)
        assert any(base in problem.cause for problem in caught.value.problems)


def test_near_names_and_globs_know_no_base():
    with pytest.raises(UserError, match="did you mean optim=tiny") as caught:
        preflight(["optim=_tiny"])
    assert not re.search(r"\b_optim\b", str(caught.value))
    names = [config.model.name for config in preflight(["-m", "model=glob(*)"])]
    assert sorted(names) == sorted(file.stem for file in FILES if file.parent.name == "model")

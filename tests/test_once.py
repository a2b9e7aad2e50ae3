"""What `once` keeps from being done again comes to the same."""

import gc
import sys
import types
import weakref

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from gpt2_fp8.compose import composition, conf_dir
from tests import once


@pytest.fixture
def asked(monkeypatch):
    """The words that Hydra itself was asked to compose."""
    asked = []
    compose = hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda name, words, **how: asked.append(words) or compose(name, words, **how))
    once.remembered.cache_clear()
    return asked


@pytest.mark.parametrize("choices", [[], ["model=gpt2", "~experiment", "trainer=ddp"], ["model=gpt2"]], ids=" ".join)
def test_it_is_what_hydra_composes_in_any_folder(choices, asked, tmp_path, monkeypatch):
    with composition.open_catalog(conf_dir(), "config"):
        first = once.compose("config", choices, return_hydra_config=True)
        first.seed = 7  # what is done to one is not done to the next
        composed = []
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
            monkeypatch.chdir(tmp_path / folder)
            composed.append(once.compose("config", choices, return_hydra_config=True))
        assert asked == [choices]
        assert OmegaConf.to_yaml(composed[1]) == OmegaConf.to_yaml(
            hydra.compose("config", choices, return_hydra_config=True)
        )
    assert composed[0].run_name != composed[1].run_name, "${now:...} to a microsecond"
    assert [one.hydra.runtime.cwd for one in composed] == [str(tmp_path / folder) for folder in ("one", "two")]


def test_preflight_composes_by_it():
    assert composition.compose is once.compose


def test_a_users_files_and_hydras_settings_are_composed_each_time(asked, tmp_path):
    for seed in (5, 6):
        (tmp_path / "mine.yaml").write_text(f"seed: {seed}\n")
        with composition.open_catalog(tmp_path, "mine"):
            assert once.compose("mine", []).seed == seed
    with composition.open_catalog(conf_dir(), "config"):
        for _ in range(2):
            once.compose("config", ["hydra.job.name=x"])
            once.compose("config", ["+notes=${seed}"])
    assert len(asked) == 6


@pytest.mark.parametrize("file", sorted(conf_dir().rglob("*.yaml")), ids=lambda path: path.name)
def test_a_text_is_loaded_as_omegaconf_loads_it(file):
    once.load(file)["another"] = 7  # what is done to one is not done to the next
    with file.open() as opened:
        loaded = once.load(opened)
    assert (type(loaded), OmegaConf.to_yaml(loaded)) == (DictConfig, OmegaConf.to_yaml(once.original_load(file)))


def test_a_changed_text_is_another(tmp_path):
    for seed in (1, 2):
        (tmp_path / "x.yaml").write_text(f"seed: {seed}")
        assert OmegaConf.load(tmp_path / "x.yaml").seed == seed
    assert OmegaConf.load is once.load


class Node:
    """One of a circle, which only a collection frees."""


def test_old_objects_are_left_out_of_a_collection_and_new_garbage_is_not(monkeypatch):
    for number in range(once.MODULES):
        monkeypatch.setitem(sys.modules, f"module_{number}", types.ModuleType(f"module_{number}"))
    old = Node()
    once.OldObjects().pytest_runtest_protocol(anywhere())
    assert not any(each is old for each in gc.get_objects())
    new = Node()
    new.itself, freed = new, weakref.ref(new)
    del new
    assert freed() is not None
    gc.collect()
    assert freed() is None


def test_they_are_looked_for_where_modules_were_imported(monkeypatch):
    collections = []
    monkeypatch.setattr(once, "gc", types.SimpleNamespace(collect=lambda: collections.append(1), freeze=lambda: None))
    objects = once.OldObjects()
    for number in range(2 * once.MODULES):
        objects.pytest_runtest_protocol(anywhere())
        monkeypatch.setitem(sys.modules, f"module_{number}", types.ModuleType(f"module_{number}"))
    assert len(collections) == 2


def test_on_a_gpu_nothing_is_left_out(monkeypatch):
    monkeypatch.setattr(once, "gc", None)  # whose functions cannot be called then
    once.OldObjects().pytest_runtest_protocol(anywhere(marker="gpu"))


def anywhere(marker=None):
    """A test with a marker, or without."""
    return types.SimpleNamespace(get_closest_marker=lambda name: name == marker)

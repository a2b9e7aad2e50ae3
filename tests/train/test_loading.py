"""How torch and the training program are imported."""

import gc
import sys

import pytest

import gpt2_fp8.train
from gpt2_fp8.train import fit, loading


@pytest.fixture
def first(monkeypatch):
    """Have `fit` imported for the first time; the list returned says whether garbage was collected meanwhile."""
    seen = []

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "gpt2_fp8.train.fit":
                seen.append(gc.isenabled())

    monkeypatch.setattr(gpt2_fp8.train, "fit", fit)
    monkeypatch.delitem(sys.modules, "gpt2_fp8.train.fit")
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    return seen


def test_the_first_import_is_not_interrupted_by_collections_and_none_looks_at_it_later(first):
    own = []
    assert loading._imported().__name__ == "run"
    assert first == [False]
    assert gc.isenabled()
    assert not any(each is own for each in gc.get_objects()), "all objects so far"


@pytest.mark.usefixtures("first")
def test_the_next_jobs_objects_are_collected():
    loading._imported()
    own = []
    loading._imported()
    assert any(each is own for each in gc.get_objects())


def test_an_import_that_fails_leaves_collections_as_they_were(first, monkeypatch):
    monkeypatch.setitem(sys.modules, "gpt2_fp8.train.build", None)
    with pytest.raises(ImportError):
        loading._imported()
    assert first == [False]
    assert gc.isenabled()


def test_who_collects_nothing_is_left_alone(first):
    gc.disable()
    try:
        loading._imported()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert first == [False]

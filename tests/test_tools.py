"""The tools of the tests: forked programs, what is composed once, and the fast ring."""

import subprocess
import sys

import hydra
import pytest
from omegaconf import OmegaConf

from gpt2_fp8.compose import composition
from tests import once
from tests.fast_ring import alone

WORDS = [
    [],
    ["model=gpt2", "~experiment", "trainer=ddp"],
    ["seed=3", "model=gpt2", "++optim.lr=0.1", "++recipe.margin=3", "++precision.keep_bf16=[head]", "++tags.a=1"],
    ["data=mixture", "+data@data.sources.web=fineweb", "++data.sources.web.repo=x/y", "++a.b={c: [1, d]}"],
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_it_is_what_hydra_composes(words):
    with composition.open_catalog():
        once.compose("config", words, return_hydra_config=True).seed = 7  # what is done to one is not done to the next
        composed = once.compose("config", words, return_hydra_config=True)
        expected = hydra.compose("config", words, return_hydra_config=True)
    assert OmegaConf.to_yaml(composed) == OmegaConf.to_yaml(expected)


def test_a_fast_test_that_starts_something_fails():
    with alone(), pytest.raises(pytest.fail.Exception, match="mark it `whole`"):
        subprocess.run([sys.executable, "-c", ""])

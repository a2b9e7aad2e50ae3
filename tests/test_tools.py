"""The tools of the tests: forked programs, what is composed once, and the fast ring."""

import subprocess
import sys

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from gpt2_fp8.compose import composition
from tests import once
from tests.fast_ring import alone

WORDS = [
    [],
    ["model=gpt2", "~experiment", "trainer=ddp"],
    ["seed=3", "model=gpt2", "++optim.lr=0.1", "++recipe.margin=3", "++precision.keep_bf16=[head]", "++tags.a=1"],
    ["data=mixture", "+data@data.sources.web=fineweb", "++data.sources.web.repo=x/y", "++a.b={c: [1, d]}"],
    ["trainer=ddp", "hydra.run.dir=x", "hydra.job.name=rank_1", "hydra.output_subdir=null", "run_name=a${data.seed}"],
    [
        "hydra/launcher=joblib",
        "experiment=glob(tiny*)",
        "seed=1,2",
        "hydra.mode=MULTIRUN",
        "hydra.sweep.dir=q${hydra:job.num}",
    ],
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_it_is_what_hydra_composes(words):
    with composition.open_catalog():
        loader = GlobalHydra.instance().config_loader()
        for mode in RunMode:
            asked = loader, "config", words, mode, True, mode == RunMode.MULTIRUN
            once.compose(*asked).seed = 7  # what is done to one is not done to the next
            composed, expected = once.compose(*asked), once.original_compose(*asked)
            assert OmegaConf.to_yaml(composed) == OmegaConf.to_yaml(expected)


def test_a_fast_test_that_starts_something_fails():
    with alone(), pytest.raises(pytest.fail.Exception, match="mark it `whole`"):
        subprocess.run([sys.executable, "-c", ""])

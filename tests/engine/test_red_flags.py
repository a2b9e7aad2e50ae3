"""FP8's red flags: each is raised by its cause alone, once, and its remedy is a command line that composes."""

import math
import re
import shlex

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config.schema import DelayedRecipe, StatelessRecipe
from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.engine.red_flags import QUIET, SETTLED, FP8RedFlags
from gpt2_fp8.fp8.fp8_tensors import FP8Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STATELESS = StatelessRecipe(name="current")


def recipe(margin=0):
    return DelayedRecipe(name="delayed", margin=margin, amax_history_len=16, amax_compute_algo="max")


def health(layer="blocks.1.fc1", kind="input", dtype=E4M3, **figures):
    given = {"amax": 4.0, "scale": 112.0, "headroom": 0.0, "saturated": 1e-5, "flushed": 0.01, "age": 0, "jump": 0.1}
    return Health(FP8Tensor(layer, kind, dtype), **given | figures)


def flags(of=None, warm_up=0):
    said = []
    return FP8RedFlags(of or recipe(), warm_up, said.append), said


def settled(of=None):
    made, said = flags(of)
    for step in range(SETTLED):
        made.judge(step + 1, [health()])
    return made, said


def test_a_healthy_run_raises_none():
    made, said = flags()
    for step in range(1, 400):
        made.judge(step, [health(jump=math.sin(step) * 1.9), health("head", "gradient", E5M2, flushed=0.6, jump=None)])
    assert said == []


RAISED = [
    (recipe(), {"amax": math.nan}, "the amax of the input of blocks.1.fc1 is nan"),
    (recipe(), {"amax": 0.0}, "the amax of the input of blocks.1.fc1 is 0: every value of it is"),
    (recipe(), {"scale": 2.0**60}, "the scale of the input of blocks.1.fc1 is 1.15e+18, at an amax of 4"),
    (recipe(), {"saturated": 0.02}, "2.00% of the input of blocks.1.fc1 saturates (headroom 0.00)"),
    (recipe(3), {"flushed": 0.5}, "50% of the input of blocks.1.fc1 becomes 0 (headroom 0.00)"),
    (STATELESS, {"saturated": 0.5, "jump": None}, "50.00% of the input of blocks.1.fc1 saturates (headroom 0.00)"),
    (recipe(), {"jump": -9.0}, "the scale of the input of blocks.1.fc1 has changed by 2^-9.0, to 112"),
]


WAYS = r"recipe=delayed recipe\.margin=\d+|precision\.keep_bf16='\S+'|recipe=block|precision=fp8_hybrid"


@pytest.mark.parametrize(("of", "figures", "text"), RAISED, ids=lambda value: str(value)[:40])
def test_each_cause_is_one_line_with_a_remedy_that_composes(of, figures, text):
    made, said = settled(of)
    for step in (76, 77) if "saturated" in figures and of is not STATELESS else (77,):
        made.judge(step, [health("blocks.0.fc1"), health(**figures)])
    assert said == [said[0]]
    line, remedy = said[0].split("; ", 1)
    assert line == f"step 77: FP8: {text}"
    ways = re.findall(WAYS, remedy)
    assert ways or "optim.lr" in remedy
    for words in ways:
        compose.preflight(["model.n_layer=2", *shlex.split(words)])


def test_a_delayed_scale_may_lag_once():
    for of, least in ((recipe(), 3), (STATELESS, 1)):
        made, said = flags(of)
        made.judge(1, [health(saturated=0.02, jump=None)])
        assert bool(said) == (least == 1)
        made.judge(2, [health(jump=None)])
        made.judge(3, [health(saturated=None, jump=None)])  # a reading without a pass says nothing of it
        made.judge(4, [health(saturated=0.02, jump=None)])
        assert bool(said) == (least == 1)
        made.judge(5, [health(saturated=None, jump=None)])
        made.judge(6, [health(saturated=0.02, jump=None)])
        assert len(said) == 1


def test_the_same_flag_is_quiet_for_a_while_and_a_new_tensor_is_not():
    made, said = flags()
    bad = health(saturated=0.5)
    for step in range(1, QUIET + 1):
        made.judge(step, [bad])
    assert len(said) == 1
    for step in (QUIET, QUIET + 1):
        made.judge(step, [bad, health("blocks.0.qkv", saturated=0.5)])
    assert len(said) == 2
    made.judge(QUIET + 2, [health(flushed=0.9)])
    assert len(said) == 3, "another flag of the same tensor"


def test_jumps_of_the_first_readings_and_of_the_warm_up_are_not_judged():
    made, said = flags(warm_up=100)
    for step in range(10, 110, 10):
        made.judge(step, [health(jump=12.0)])
    assert said == []
    made.judge(110, [health(jump=12.0)])
    assert "has changed by 2^12.0" in said[0]

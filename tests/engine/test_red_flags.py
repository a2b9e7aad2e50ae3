"""Red flags of FP8 and of any run: each is raised by its cause alone, once; its remedy is words that compose."""

import math
import random
import re
import shlex

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config.schema import DelayedRecipe, StatelessRecipe
from gpt2_fp8.engine import red_flags
from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.engine.red_flags import QUIET, SETTLED, FP8RedFlags, RunWatch
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


WARM_UP = 15


def curve(rows, seed=0, noise=0.004, floor=3.3):
    """The loss of a healthy run: fast at first, then ever more slowly, with the noise of batches."""
    draw = random.Random(seed)
    return [floor + 7.5 * (1 + i) ** -0.55 * (1 + draw.gauss(0, noise)) + draw.gauss(0, noise) for i in range(rows)]


def watched(losses, waits=()):
    said = []
    watch = RunWatch(WARM_UP, {"data.num_workers": 4}, said.append)
    for i, loss in enumerate(losses):
        row = {"train_loss": loss} | ({"data_wait": waits[i]} if i < len(waits) else {})
        watch.see(i + 1, row)
    return said


@pytest.mark.parametrize("rows", [60, 240, 2000])
@pytest.mark.parametrize("noise", [0.001, 0.004, 0.03])
def test_a_healthy_curve_raises_none(rows, noise):
    assert [said for seed in range(5) for said in watched(curve(rows, seed, noise))] == []


def test_a_spike_is_said_once_with_its_size():
    losses = curve(200)
    losses[120] += 0.5
    (said,) = watched(losses)
    found = re.fullmatch(r"step 121: the loss has risen to ([\d.]+), from about ([\d.]+); .*", said)
    assert float(found[1]) == pytest.approx(losses[120], abs=0.001)
    assert float(found[2]) == pytest.approx(losses[119], abs=0.1)


def test_a_loss_that_stays_high_is_said_once_in_a_while():
    losses = curve(200)
    said = watched([*losses, *(loss + 2 for loss in curve(100)[50:])])
    assert len([line for line in said if "has risen" in line]) == 1


def test_a_plateau_is_said_and_a_slow_fall_is_not():
    flat = [*curve(60), *(3.9 + random.Random(i).gauss(0, 0.005) for i in range(140))]
    assert len([line for line in watched(flat) if "has not fallen" in line]) >= 1
    assert red_flags.plateau(curve(2000)) is None
    assert red_flags.plateau([3.0] * (4 * red_flags.QUARTER - 1)) is None, "too early to say"
    assert red_flags.plateau([3.0] * 4 * red_flags.QUARTER) == (3.0, 3.0)


def test_the_warm_up_and_what_is_not_finite_are_not_judged():
    assert watched([5.0] * (WARM_UP - 1) + [50.0]) == []
    assert watched([math.nan] * 50) == []
    assert red_flags.spike_limit([3.0] * (red_flags.RECENT - 1)) is None


def test_waiting_for_data_names_its_key():
    assert watched(curve(40), [0.04] * 40) == []
    assert watched(curve(40), [0.04, 0.3, 0.3, 0.3, 0.3] * 8) == [], "now and then is no reason"
    (said,) = watched(curve(40), [0.0] * 10 + [0.12] * red_flags.WAITS)
    assert said == "step 15: 12% of the time is spent waiting for data; data.num_workers=8 (now 4)"
    compose.preflight([said.split("; ")[1].split()[0]])

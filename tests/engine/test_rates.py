"""Rates of their own for tables and vectors: which parameters have them, in which order, and the schedule."""

from dataclasses import replace

import pytest
import torch

from gpt2_fp8.config.schema import AdamWOptimizer, MuonOptimizer, RegisteredOptimizer
from gpt2_fp8.engine.optim import build_optimizer, build_schedule, learning_rate_factor
from gpt2_fp8.runtime import registry
from tests.common import CONFIG, OPTIM, build
from tests.engine.test_muon import fill
from tests.model.options import MODERN

MUON = MuonOptimizer(name="muon", matrix_lr=0.03, momentum=0.95, ns_steps=5)
CHOICES = {"muon": MUON, **{name: AdamWOptimizer(name=name) for name in ("adamw", "adamw_bf16")}}
RATES = {"embedding_lr": 0.05, "scalar_lr": 0.04}
MODELS = {"GPT-2": CONFIG, "of 2026": replace(CONFIG, **MODERN), "untied": replace(CONFIG, tied_head=False)}
every_choice = pytest.mark.parametrize("choice", CHOICES)
every_model = pytest.mark.parametrize("model", MODELS)


def rates(model, optimizer):
    """Of each parameter the rate and the weight decay."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }


def expected(name, parameter, choice, own):
    if parameter.dim() < 2:
        return own.get("scalar_lr", OPTIM.lr), 0.0
    if name.startswith("blocks."):
        return MUON.matrix_lr if choice == "muon" else OPTIM.lr, 0.1
    return OPTIM.lr if name == "head.weight" else own.get("embedding_lr", OPTIM.lr), 0.1


@pytest.mark.parametrize("keys", [[], *([key] for key in RATES), list(RATES)], ids=str)
@every_model
@every_choice
def test_each_parameter_has_its_rate_and_the_order_of_a_checkpoint(choice, model, keys):
    made, own = build(MODELS[model]), {key: RATES[key] for key in keys}
    optimizer = build_optimizer(made, replace(OPTIM, **own), CHOICES[choice])
    named = dict(made.named_parameters())
    assert rates(made, optimizer) == {name: expected(name, p, choice, own) for name, p in named.items()}
    plain = build_optimizer(made, OPTIM, CHOICES[choice]).param_groups
    assert len(plain) == (3 if choice == "muon" else 2)
    orders = [[id(p) for group in of for p in group["params"]] for of in (optimizer.param_groups, plain)]
    assert orders[0] == orders[1], "by which a checkpoint's state is found"
    assert optimizer.param_groups[0]["lr"] == OPTIM.lr, "which is logged"


@every_model
@every_choice
def test_equal_rates_change_no_bit_and_another_rate_changes_its_parameters_alone(choice, model):
    same = replace(OPTIM, embedding_lr=OPTIM.lr, scalar_lr=OPTIM.lr)
    models = [build(MODELS[model]) for _ in range(3)]
    optims = OPTIM, same, replace(same, embedding_lr=2 * OPTIM.lr)
    optimizers = [build_optimizer(m, o, CHOICES[choice]) for m, o in zip(models, optims, strict=True)]
    for seed in range(3):
        for made, optimizer in zip(models, optimizers, strict=True):
            fill(made, seed)
            optimizer.step()
    plain, equal, faster = (dict(made.named_parameters()) for made in models)
    for name in plain:
        assert torch.equal(plain[name], equal[name]), name
        assert torch.equal(plain[name], faster[name]) == (name not in ("tokens.weight", "positions.weight")), name


@every_choice
def test_every_rate_follows_the_schedule(choice):
    model, own = build(MODELS["of 2026"]), replace(OPTIM, **RATES)
    optimizer = build_optimizer(model, own, CHOICES[choice])
    peaks, schedule = rates(model, optimizer), build_schedule(optimizer, own, 40)
    for step in range(40):
        factor = learning_rate_factor(step, own, 40)
        assert rates(model, optimizer) == {name: (peak * factor, decay) for name, (peak, decay) in peaks.items()}
        fill(model, step)
        optimizer.step()
        schedule.step()


def test_an_optimizer_of_ones_own_is_given_the_rates(monkeypatch):
    seen = []

    def sgd(groups, optim):
        seen.extend(map(dict, groups))
        return torch.optim.SGD(groups, lr=optim.lr)

    monkeypatch.setattr(registry, "make", lambda key, name, kind, *arguments: sgd(*arguments))
    model, choice = build(MODELS["of 2026"]), RegisteredOptimizer(name="registered", factory="sgd", state_bytes=0)
    found = rates(model, build_optimizer(model, replace(OPTIM, **RATES), choice))
    assert found == {name: expected(name, p, "sgd", RATES) for name, p in model.named_parameters()}
    assert ["lr" in group for group in seen] == [False, True, True]
    seen.clear()
    build_optimizer(model, OPTIM, choice)
    assert ["lr" in group for group in seen] == [False, False], "the factory decides"

"""Words of `precision.emulate` beside those that keep layers in bf16: what has no effect is refused, and not said."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

from gpt2_fp8.backends.emulated import Emulated
from gpt2_fp8.compose import preflight
from gpt2_fp8.config import emulation, emulation_check, kept_check
from gpt2_fp8.config.kept_layers import PARTS, every_layer, kept
from gpt2_fp8.config.precision_schema import EMULATABLE, EMULATED, IN_BACKWARD
from gpt2_fp8.layers.emulated_gemm import Casts, Emulation

N_LAYER = 4
KEPT = (
    [], ["head"], ["first"], ["*"], ["blocks.*"], ["blocks.*.mlp"], ["first:2", "last:2"], ["head", "blocks.*"],
    ["blocks.*.mlp", "head", "blocks.*.projection", "blocks.*.qkv"],
)  # fmt: skip
EMULATE = (
    [], ["weight"], ["head"], ["residual"], ["head_weight", "dgrad_gradient"], ["wgrad_input", "head"], ["wgrad_input"],
    ["fprop_input", "weight"], ["head_fprop_input"], ["head", "head_weight"], ["residual", "head"],
    ["fprop_input", "wgrad_input", "head_wgrad_gradient"], ["dgrad_gradient", "wgrad_gradient", "wgrad_input"],
)  # fmt: skip
BACKWARD = ("fp8", "bf16", "bf16_wgrad")


@pytest.fixture(scope="module")
def base():
    (config,) = preflight([f"model.n_layer={N_LAYER}", "precision.backend=emulated"])
    return config


def said(config):
    return Emulated(config, "fp8_hybrid", "cpu").kernels(257)["emulated"]


def found_in(base, precision):
    return [*emulation_check.check(precision, N_LAYER), *kept_check.check(replace(base, precision=precision))]


def mended(precision, remedy):
    """What comes of each way that a remedy names."""
    if twice := re.fullmatch(r"leave out (.*)", remedy):
        for names in twice[1].split(", or "):
            yield replace(precision, emulate=[name for name in precision.emulate if name not in names.split(", ")])
        return
    for way in remedy.split(", or "):
        changed = precision
        if names := re.search(r"leave ([\w, ]+) out of precision.emulate", way):
            changed = replace(changed, emulate=[name for name in changed.emulate if name not in names[1].split(", ")])
        if (kept := re.search(r"precision.keep_bf16='\[(.*)\]'", way)) or "leave precision.keep_bf16 out" in way:
            changed = replace(changed, keep_bf16=kept[1].split(",") if kept and kept[1] else [])
        if "precision.backward=fp8" in way:
            changed = replace(changed, backward="fp8")
        assert changed != precision, way
        yield changed


def computed(precision):
    """How each operand of each layer is cast, which the layers take from the same words by themselves."""
    switched = frozenset(emulation.switches(precision))
    how = Emulation("current", torch.float8_e4m3fn, torch.float8_e5m2, switched, precision.backward)
    layers, residual = kept(precision.keep_bf16, N_LAYER), "residual" in switched
    blocks = [
        [(how.casts(), residual) if part in layers.in_fp8(block) else (Casts(*[None] * 5), False) for part in PARTS]
        for block in range(N_LAYER)
    ]
    return blocks, residual, Casts(*[None] * 5) if layers.head else how.head_casts(torch.float8_e5m2)


def with_one_word_less(precision):
    for key in ("emulate", "keep_bf16"):
        words = getattr(precision, key)
        yield from (replace(precision, **{key: [*words[:i], *words[i + 1 :]]}) for i in range(len(words)))
    if precision.backward != "fp8":
        yield replace(precision, backward="fp8")


@pytest.mark.parametrize("backward", BACKWARD)
def test_accepted_is_what_has_an_effect_by_every_word_and_every_way_out_is_accepted(base, backward):
    """An effect is another cast of an operand, or another sum of the residual stream, in some layer."""
    refused = 0
    for keep, emulate in itertools.product(KEPT, EMULATE):
        precision = replace(base.precision, keep_bf16=keep, emulate=emulate, backward=backward)
        found = found_in(base, precision)
        refused += bool(found)
        for one in found:
            ways = list(mended(precision, one.problem.remedy))
            assert ways
            for changed in ways:
                left = {other.keys for other in found_in(base, changed)}
                assert left < {other.keys for other in found}, (keep, emulate, changed)
        idle = [less for less in with_one_word_less(precision) if computed(less) == computed(precision)]
        nothing = every_layer(kept(keep, N_LAYER)) or {"head", "head_weight"} <= set(emulate)
        assert bool(found) == bool(idle or nothing), (keep, emulate, found, idle)
        if not found:
            asked = {name for name in emulate if name not in IN_BACKWARD[backward]}
            assert emulation.effective(precision, N_LAYER) == [name for name in EMULATABLE if name in asked]
    assert 0 < refused < len(KEPT) * len(EMULATE)


@pytest.mark.parametrize(
    ("keep", "listed"),
    [
        ([], ", ".join(EMULATED)),
        (["head"], ", ".join(EMULATED[:-1])),
        (["blocks.*.mlp", "last"], ", ".join(EMULATED)),
        (["blocks.*"], "residual, head"),
    ],
    ids=str,
)
def test_the_log_lists_what_is_left_of_all(base, keep, listed):
    assert said(replace(base, precision=replace(base.precision, keep_bf16=keep))) == listed


def test_a_backward_in_bf16_and_kept_layers_are_told_at_once(base):
    precision = replace(base.precision, keep_bf16=["blocks.*"], backward="bf16", emulate=["dgrad_gradient", "weight"])
    assert [one.keys for one in emulation_check.check(precision, N_LAYER)] == [
        ("precision.emulate", "precision.backward"),
        ("precision.emulate", "precision.keep_bf16"),
    ]


def test_a_word_that_is_there_twice_counts_once(base):
    """As in `precision.keep_bf16`."""
    twice = replace(base, precision=replace(base.precision, emulate=["weight", "head", "weight"]))
    assert list(emulation_check.check(twice.precision, N_LAYER)) == []
    assert said(twice) == "weight, head"

"""Words of `precision.emulate` beside those that keep layers in bf16: what has no effect is refused, and not said."""

import itertools
import re
from dataclasses import replace

import pytest

from gpt2_fp8.backends.emulated import Emulated
from gpt2_fp8.compose import preflight
from gpt2_fp8.config import emulation, kept_check
from gpt2_fp8.config.precision_schema import EMULATABLE, EMULATED

N_LAYER = 4
KEPT = (
    [], ["head"], ["first"], ["*"], ["blocks.*"], ["blocks.*.mlp"], ["first:2", "last:2"], ["head", "blocks.*"],
    ["blocks.*.mlp", "head", "blocks.*.projection", "blocks.*.qkv"],
)  # fmt: skip
EMULATE = ([], ["weight"], ["head"], ["residual"], ["head_weight", "dgrad_gradient"], ["wgrad_input", "head"])


@pytest.fixture(scope="module")
def base():
    (config,) = preflight([f"model.n_layer={N_LAYER}", "precision.backend=emulated"])
    return config


def said(config):
    return Emulated(config, "fp8_hybrid", "cpu").kernels(257)["emulated"]


def found_in(base, precision):
    return [*emulation.check(precision, N_LAYER), *kept_check.check(replace(base, precision=precision))]


def mended(precision, remedy):
    """The ways that a remedy names: nothing that is kept, or less that is cast, or less that is kept."""
    if remedy == "leave precision.keep_bf16 out":
        yield replace(precision, keep_bf16=[])
        return
    left_out = re.match(r"leave ([\w, ]+) out of precision.emulate", remedy)[1].split(", ")
    kept = re.search(r"precision.keep_bf16='\[(.*)\]'", remedy)[1]
    yield replace(precision, emulate=[name for name in precision.emulate if name not in left_out])
    yield replace(precision, keep_bf16=kept.split(",") if kept else [])


def test_what_is_kept_in_bf16_is_not_asked_for_in_fp8(base):
    """Accepted is only what has a tensor in FP8 for each word; what is refused is accepted in both ways out."""
    refused = 0
    for keep, emulate in itertools.product(KEPT, EMULATE):
        precision = replace(base.precision, keep_bf16=keep, emulate=emulate)
        found = found_in(base, precision)
        refused += len(found)
        for one in found:
            for changed in mended(precision, one.problem.remedy):
                assert found_in(base, changed) == [], (keep, emulate, changed)
        if not found:
            assert emulation.effective(precision, N_LAYER) == [name for name in EMULATABLE if name in emulate]
            tensors = Emulated(replace(base, precision=precision), "fp8_hybrid", "cpu").fp8_tensors()
            asked = {name.partition("_")[0] == "head" for name in emulate if name != "residual"}
            assert {tensor.layer == "head" for tensor in tensors} == asked, (keep, emulate)
    assert refused == 27, "6 for each of the 3 that keep all, 3 for each of the 3 that keep the head or the blocks"


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
    assert [one.keys for one in emulation.check(precision, N_LAYER)] == [
        ("precision.emulate", "precision.backward"),
        ("precision.emulate", "precision.keep_bf16"),
    ]


def test_a_word_that_is_there_twice_counts_once(base):
    """As in `precision.keep_bf16`."""
    twice = replace(base, precision=replace(base.precision, emulate=["weight", "head", "weight"]))
    assert list(emulation.check(twice.precision, N_LAYER)) == []
    assert said(twice) == "weight, head"

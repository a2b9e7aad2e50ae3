"""Which layers the words of `precision.keep_bf16` name."""

import pytest

from gpt2_fp8.config.kept_layers import ALL_PARTS, MLP, fits_nothing, parse_kept, partly, split_mlp

NONE = frozenset()


def parts(*names, n_layer=4):
    return list(parse_kept(names, n_layer).blocks)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("first", [0]), ("last", [3]), ("first:2", [0, 1]), ("last:3", [1, 2, 3]), ("blocks.2", [2]),
        ("blocks.[13]", [1, 3]), ("blocks.?", [0, 1, 2, 3]), ("blocks.*", [0, 1, 2, 3]), ("head", []),
    ],
)  # fmt: skip
def test_whole_blocks(name, whole):
    assert parts(name) == [ALL_PARTS if i in whole else NONE for i in range(4)]
    assert partly(parse_kept([name], 4)) is None
    assert not fits_nothing(name, 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.1.qkv", {1: {"qkv"}}), ("blocks.1.mlp", {1: MLP}), ("*.fc2", {i: {"fc2"} for i in range(4)}),
        ("blocks.[01].projection", {0: {"projection"}, 1: {"projection"}}), ("blocks.3.*", {3: ALL_PARTS}),
        ("blocks.0.fc?", {0: MLP}),
    ],
)  # fmt: skip
def test_parts(name, expected):
    assert parts(name) == [frozenset(expected.get(i, NONE)) for i in range(4)]


def test_names_add_up():
    assert parts("blocks.0.qkv", "blocks.0.projection", "blocks.0.mlp")[0] == ALL_PARTS
    both = parse_kept(["head", "first", "*.mlp"], 3)
    assert both.head
    assert (both.in_fp8(0), both.in_fp8(1)) == (NONE, {"qkv", "projection"})
    assert (partly(both), split_mlp(both)) == ("blocks.1", None)
    assert split_mlp(parse_kept(["blocks.2.fc1"], 3)) == "blocks.2"


@pytest.mark.parametrize(
    "name",
    ["", "heads", "blocks", "blocks.4", "blocks.-1", "blocks.01", "blocks.0.", "blocks.0.norm", "first:5", "first:0",
     "first:", "first:1:1", "last:\uff19", "First", "blocks.0.mlp.fc1", "blocks.[9]", "first:99999999999999999999"],
)  # fmt: skip
def test_what_fits_nothing(name):
    assert fits_nothing(name, 4)
    assert parts(name) == [NONE] * 4
    assert not parse_kept([name], 4).head

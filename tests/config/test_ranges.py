"""Ranges that a key's type declares: what is let pass, what is refused, and in which words."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from gpt2_fp8.config.keys import meanings
from gpt2_fp8.config.parsing import build
from gpt2_fp8.config.ranges import Range, above_zero, at_least


@dataclass(frozen=True)
class Garden:
    trees: Annotated[int, at_least(1, 100, "trees")]
    ponds: Annotated[int, at_least(0), "those with fish"]
    shade: Annotated[float, Range(0, 1, open_most=True)]
    slope: Annotated[float, Range(0, 1)]
    depth: Annotated[float, above_zero(50, "metres")]
    gates: Annotated[int, at_least(1)] | Literal["auto"]
    fence: Annotated[Annotated[int, at_least(1)] | None, "its height"]
    rows: Annotated[list[Annotated[int, at_least(1, 9, "rows")]], "plants in each"]


GOOD = {"trees": 1, "ponds": 0, "shade": 0, "slope": 1, "depth": 0.5, "gates": "auto", "fence": None, "rows": [1, 9]}


def found(**changes):
    garden, problems = build(Garden, GOOD | changes, "garden")
    assert (garden is None) == bool(problems)
    return [(finding.keys, *finding.problem) for finding in problems]


@pytest.mark.parametrize(
    "change",
    [{}, {"trees": 100}, {"shade": 0.999}, {"slope": 0}, {"depth": 50}, {"gates": 1}, {"fence": 10**12}, {"rows": []}],
    ids=str,
)
def test_what_is_in_range_passes(change):
    assert found(**change) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"trees": 0}, "must be at least 1"),
        ({"trees": 101}, "is beyond 100 trees"),
        ({"ponds": 10**12 + 1}, "is beyond 1,000,000,000,000"),
        ({"shade": 1}, "must be at least 0 and below 1"),
        ({"shade": 1e-39}, "is beyond what float32 can hold"),
        ({"slope": 1.01}, "must be from 0 to 1"),
        ({"depth": 0}, "must be above 0"),
        ({"depth": 51}, "is beyond 50 metres"),
        ({"rows": [2, 0, 10]}, "must be at least 1"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_once(change, reason):
    ((keys, cause, _),) = found(**change)
    (key,) = change
    assert keys == (f"garden.{key}",)
    assert cause.startswith(f"garden.{key}=")
    assert cause.endswith(f": {reason}")


def test_meanings_are_those_of_the_types():
    assert meanings(Garden) == {"ponds": "those with fish", "fence": "its height", "rows": "plants in each"}

"""From plain values to dataclasses: what is built, what is refused and why, and what keys are called."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from gpt2_fp8.config.keys import Range, key_paths, meanings, show
from gpt2_fp8.config.parsing import build


@dataclass(frozen=True)
class Cat:
    kind: Literal["cat"]
    lives: int


@dataclass(frozen=True)
class Dog:
    kind: Literal["dog", "wolf"]
    bark: float


@dataclass(frozen=True)
class House:
    name: str
    rooms: Annotated[int, Range(1), "how many"]
    height: Annotated[float, Range(0, 50, open_least=True)]
    garden: bool
    colour: Literal["red", "green"] | None
    floors: Annotated[int, Range(1)] | Literal["auto"]
    guests: list[str]
    steps: Annotated[list[Annotated[int, Range(1, 9)]], "of each stair"]
    shade: Annotated[float, Range(0, 1, open_most=True)] | None
    tags: dict[str, int]
    pet: Cat | Dog


GOOD = {
    "name": "x", "rooms": 3, "height": 2.5, "garden": True, "colour": None, "floors": "auto", "guests": ["a"],
    "steps": [1, 9], "shade": 0, "tags": {"a": 1}, "pet": {"kind": "wolf", "bark": 1},
}  # fmt: skip


def problems(**changes):
    house, found = build(House, GOOD | changes)
    assert (house is None) == bool(found)
    return found


def test_builds_the_classes():
    house, found = build(House, GOOD)
    assert not found
    assert house == House("x", 3, 2.5, True, None, "auto", ["a"], [1, 9], 0.0, {"a": 1}, Dog("wolf", 1.0))
    assert type(house.pet.bark) is float
    assert build(House, GOOD | {"name": 42})[0].name == "42", "a whole number is text too"
    assert not problems(height=50, shade=0.999, steps=[], floors=10**12)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rooms": True}, "a whole number"),
        ({"rooms": "3"}, "a whole number"),
        ({"height": "1e-3"}, "a number"),
        ({"height": float("nan")}, "not a finite number"),
        ({"garden": "off"}, "true or false"),
        ({"colour": "gren"}, "red, green or null"),
        ({"floors": "aut"}, "a whole number or auto"),
        ({"guests": 3}, "needs a list"),
        ({"guests": [True]}, "needs a list"),
        ({"name": 1.5}, "must be text"),
        ({"name": "???"}, "no value"),
        ({"tags": 3}, "keys with values"),
        ({"pet": "cat"}, "not a group of keys"),
        ({"pet": {"kind": "dogg", "bark": 1}}, "no such choice"),
        ({"pet": {"bark": 1}}, "pet.kind=null"),
        ({"pet": {"kind": "cat"}}, "pet.lives is missing"),
        ({"pet": {"kind": "cat", "lives": 9, "bark": 2}}, "pet.bark belongs to pet.kind=dog or wolf"),
        ({"room": 4}, "there is no key room"),
        ({"rooms": 0}, "must be at least 1"),
        ({"floors": 10**12 + 1}, "is beyond 1,000,000,000,000"),
        ({"shade": 1}, "must be at least 0 and below 1"),
        ({"shade": 1e-39}, "is beyond what float32 can hold"),
        ({"height": 0}, "must be above 0 and at most 50"),
        ({"steps": [2, 0, 10]}, "must be from 1 to 9"),
    ],
)
def test_refuses_with_a_key_and_a_reason(change, reason):
    (problem,) = problems(**change)
    assert reason in problem.cause
    assert problem.keys[0].partition(".")[0] in change


def test_all_problems_are_collected():
    found = problems(rooms="a", height="b", guests=3, extra=1, pet={"kind": "cat", "lives": "x", "tail": 1})
    assert {key for problem in found for key in problem.keys} == {
        "rooms", "height", "guests", "extra", "pet.lives", "pet.tail",
    }  # fmt: skip


def test_paths_name_the_choices_that_have_them():
    paths = key_paths(House)
    assert (paths["pet.lives"], paths["pet.bark"]) == (("cat",), ("dog", "wolf"))
    assert (paths["pet.kind"], paths["rooms"]) == (("cat", "dog", "wolf"), ())
    assert meanings(House) == {"rooms": "how many", "steps": "of each stair"}


def test_values_are_shown_as_they_are_typed():
    assert [show(v) for v in (None, True, [1, "a"], "", "a\tb")] == ["null", "true", "[1,a]", "''", r"'a\tb'"]
    assert len(show("x" * 1000)) == 80

from dataclasses import dataclass
from typing import Literal

import pytest

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
    rooms: int
    height: float
    garden: bool
    colour: Literal["red", "green"] | None
    floors: int | Literal["auto"]
    guests: list[str]
    pet: Cat | Dog


GOOD = {
    "name": "x",
    "rooms": 3,
    "height": 2.5,
    "garden": True,
    "colour": None,
    "floors": "auto",
    "guests": ["a"],
    "pet": {"kind": "wolf", "bark": 1},
}


def problems(**changes):
    house, found = build(House, GOOD | changes)
    assert (house is None) == bool(found)
    return found


def only(**changes):
    (finding,) = problems(**changes)
    return finding.keys[0], finding.problem.cause, finding.problem.remedy


def test_builds_the_classes():
    house, found = build(House, GOOD)
    assert not found
    assert house == House("x", 3, 2.5, True, None, "auto", ["a"], Dog("wolf", 1.0))
    assert type(house.pet.bark) is float


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
        ({"guests": "bob"}, "needs a list"),
        ({"guests": [True]}, "needs a list"),
        ({"name": 1.5}, "must be text"),
        ({"name": "???"}, "no value"),
        ({"pet": "cat"}, "not a group of keys"),
        ({"pet": {"kind": "dogg", "bark": 1}}, "no such choice"),
        ({"pet": {"bark": 1}}, "pet.kind=null"),
        ({"pet": {"kind": "cat"}}, "pet.lives is missing"),
        ({"pet": {"kind": "cat", "lives": 9, "bark": 2}}, "pet.bark belongs to pet=dog"),
        ({"room": 4}, "there is no key room"),
    ],
)
def test_refuses_with_a_reason(change, reason):
    assert reason in only(**change)[1]


def test_a_whole_number_is_text_too():
    house, _ = build(House, GOOD | {"name": 42})
    assert house.name == "42"


def test_all_problems_are_collected():
    found = problems(rooms="a", height="b", guests=3, extra=1, pet={"kind": "cat", "lives": "x", "tail": 1})
    assert {key for finding in found for key in finding.keys} == {
        "rooms", "height", "guests", "extra", "pet.lives", "pet.tail",
    }  # fmt: skip

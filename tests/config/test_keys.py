from dataclasses import dataclass
from typing import Literal

from gpt2_fp8.config.keys import key_paths, show


@dataclass(frozen=True)
class Cat:
    kind: Literal["cat"]
    lives: int
    names: list[str]


@dataclass(frozen=True)
class Dog:
    kind: Literal["dog", "wolf"]
    bark: float
    names: str


@dataclass(frozen=True)
class House:
    rooms: int
    tags: dict[str, str]
    pet: Cat | Dog


HOUSE = House(3, {"street": "long"}, Dog("wolf", 1.5, "rex"))


def test_paths_name_the_choices_that_have_them():
    paths = key_paths(House)
    assert paths["pet.lives"] == ("cat",)
    assert paths["pet.bark"] == ("dog", "wolf")
    assert paths["pet.kind"] == ("cat", "dog", "wolf")
    assert paths["rooms"] == ()


def test_values_are_shown_as_they_are_typed():
    assert [show(v) for v in (None, True, [1, "a"], "", "a\tb")] == ["null", "true", "[1,a]", "''", r"'a\tb'"]
    assert len(show("x" * 1000)) == 80

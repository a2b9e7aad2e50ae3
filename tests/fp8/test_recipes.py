"""Our recipes as Transformer Engine's, on a stand-in for its constructors (tests/gpu has the real ones).

The stand-in's defaults are those of version 2.20.2, and it refuses an argument that is not there, unlike the real one.
"""

import enum
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.fp8.recipes import build_recipe
from gpt2_fp8.runtime import registry


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Recipe:
    pass


@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    backward_override: str | None = None


@dataclass
class Float8CurrentScaling(Recipe):
    fp8_format: Format = Format.HYBRID
    backward_override: str | None = None


@dataclass
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3
    backward_override: str | None = None


@dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3
    backward_override: str | None = None


CLASSES = Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling
STATELESS = {
    "current": CLASSES[0], "tensorwise": CLASSES[0], "block": CLASSES[1], "blockwise": CLASSES[1], "mxfp8": CLASSES[2],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    names = ("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe")
    package, common, recipe = (ModuleType(name) for name in names)
    for kind in (Format, Recipe, DelayedScaling, *CLASSES):
        setattr(recipe, kind.__name__, kind)
    package.common, common.recipe = common, recipe
    for name, module in zip(names, (package, common, recipe), strict=True):
        monkeypatch.setitem(sys.modules, name, module)


def built(*words):
    (config,) = preflight(list(words))
    return build_recipe(config.precision, config.recipe)


@pytest.mark.parametrize("word", STATELESS)
@pytest.mark.parametrize(("precision", "form"), [("fp8_hybrid", Format.HYBRID), ("fp8_e4m3", Format.E4M3)])
@pytest.mark.parametrize(("backward", "override"), [("fp8", None), ("bf16", "dequantized")])
def test_a_stateless_recipe_has_its_class_format_and_backward(word, precision, form, backward, override):
    made = built(f"recipe={word}", f"precision={precision}", f"precision.backward={backward}")
    assert made == STATELESS[word](fp8_format=form, backward_override=override)


@pytest.mark.parametrize(("precision", "form"), [("fp8_hybrid", Format.HYBRID), ("fp8_e4m3", Format.E4M3)])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scaling_has_its_margin_and_history_and_leaves_the_ranks_to_us(precision, form, algorithm):
    words = "recipe.margin=2", "recipe.amax_history_len=7", f"recipe.amax_compute_algo={algorithm}"
    made = built("recipe=delayed", f"precision={precision}", *words)
    assert made == DelayedScaling(2, form, 7, algorithm, reduce_amax=False, backward_override=None)


def test_a_recipe_of_ones_own_is_made_from_the_precision(monkeypatch):
    monkeypatch.setitem(registry._known, "recipe.factory", {})
    words = "plugins=[json]", "recipe=registered", "recipe.factory=own", "precision=fp8_e4m3"
    with pytest.raises(UserError, match=r"recipe\.factory"):
        built(*words)
    registry.recipe("own")(lambda precision: Float8CurrentScaling(backward_override=precision.name))
    assert built(*words) == Float8CurrentScaling(backward_override="fp8_e4m3")
    registry.recipe("late")(lambda precision: DelayedScaling())
    with pytest.raises(UserError, match="recipe=delayed"):
        built("plugins=[json]", "recipe=registered", "recipe.factory=late")
    with pytest.raises(UserError, match="is registered by no plugin"):
        preflight(["recipe=registered", "recipe.factory=own"])

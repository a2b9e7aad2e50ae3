"""The precisions, recipes and backends that a run can ask for, composed as a run's command line is.

So what is refused here, a run refuses in the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from gpt2_fp8.compose import conf_dir, configs_of
from gpt2_fp8.compose.commandline import CommandLine
from gpt2_fp8.compose.composition import Catalog, open_catalog
from gpt2_fp8.config.annotations import hints_of
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig, PlainPrecisionConfig, StatelessRecipe
from gpt2_fp8.config.schema import RunConfig

MODEL = "gpt2"  # GPT-2's block is what every backend has
RECIPES = ("delayed", *get_args(hints_of(StatelessRecipe)["name"]))
PLAIN = tuple(reversed(get_args(hints_of(PlainPrecisionConfig)["name"])))
IN_FP8 = tuple(name for name in get_args(hints_of(FP8PrecisionConfig)["name"]) if name != "fp8_e5m2")  # always refused
BACKENDS = tuple(name for name in get_args(hints_of(FP8PrecisionConfig)["backend"]) if name != "auto")


@dataclass(frozen=True)
class Offer:
    """What a run may ask for. One of `config` and `refusal` is None: the refusal holds on any machine."""

    precision: str
    recipe: str | None  # None: nothing is scaled
    backend: str
    config: RunConfig | None
    refusal: str | None

    @property
    def name(self) -> str:
        """The words of it."""
        return " ".join(filter(None, (self.precision, self.recipe, self.backend)))


def offers() -> list[Offer]:
    """Return every combination of precision, recipe and backend. Raises UserError if the settings do not compose."""
    with open_catalog(conf_dir(), "config") as catalog:
        plain = [_offer(catalog, precision, None, backend) for precision in PLAIN for backend in BACKENDS]
        scaled = [
            _offer(catalog, precision, recipe, backend)
            for precision in IN_FP8
            for recipe in RECIPES
            for backend in BACKENDS
        ]
    return plain + scaled


def config(*words: str) -> RunConfig:
    """Return the configuration of a run of `MODEL` with these words. Raises UserError."""
    problems: list[Problem] = []
    with open_catalog(conf_dir(), "config") as catalog:
        found = configs_of(CommandLine([f"model={MODEL}", *words]), catalog, problems)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return found[0]


def _offer(catalog: Catalog, precision: str, recipe: str | None, backend: str) -> Offer:
    words = [f"model={MODEL}", f"precision={precision}", f"precision.backend={backend}"]
    words += [f"recipe={recipe}", "precision.fallback=error"] if recipe else []
    problems: list[Problem] = []
    found = configs_of(CommandLine(words), catalog, problems)
    if problems:
        return Offer(precision, recipe, backend, None, problems[0].cause)
    return Offer(precision, recipe, backend, found[0], None)

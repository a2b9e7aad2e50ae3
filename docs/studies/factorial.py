"""A fractional factorial 2^(6-2) over six operands of the emulated backend: 16 conditions instead of 64.

Four operands take all 16 combinations. The other two follow from them: E = ABC and F = BCD, as products of signs. That
is resolution IV: no main effect is confounded with another one, or with an interaction of two operands. `residual` is
on in every condition: it is a matter of bfloat16, not of FP8.
"""

from __future__ import annotations

from itertools import product

from statistics_of import Effect, contrast

FACTORS = ("fprop_input", "weight", "dgrad_gradient", "wgrad_gradient", "wgrad_input", "head")
ALWAYS = "residual"


def _signs() -> list[tuple[int, ...]]:
    return [(a, b, c, d, a * b * c, b * c * d) for a, b, c, d in product((-1, 1), repeat=4)]


SIGNS = _signs()  # of the factors in each condition: 1 for FP8, -1 for bfloat16
EMULATED = [tuple(name for name, sign in zip(FACTORS, row, strict=True) if sign > 0) for row in SIGNS]


def condition(operands: tuple[str, ...]) -> str:
    """Name the condition in which `operands` are in FP8."""
    return "+".join(operands) or "none"


def settings(operands: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words that ask for it."""
    return "precision.backend=emulated", f"precision.emulate=[{','.join((*operands, ALWAYS))}]"


def main_effects(losses: dict[str, list[float]]) -> list[Effect]:
    """Estimate what each factor's FP8 adds to the loss, from every condition's losses over its seeds.

    The standard errors come from the spread between seeds, pooled over the conditions.
    """
    values = [losses[condition(operands)] for operands in EMULATED]
    return [contrast(values, [row[i] for row in SIGNS]) for i in range(len(FACTORS))]

"""Which layers `precision.keep_bf16` names. A layer here is one matrix product of the model, or several at once.

A decoder's block has four products: `qkv`, `projection`, `fc1` and `fc2`. `mlp` means the last two. A name is one of

- `head`;
- `first`, `last`, `first:N` or `last:N`: that many whole blocks;
- `blocks.3`: a whole block, and `blocks.3.qkv`, `blocks.3.mlp`: a part of it;
- a pattern of these names in the shell's way: `blocks.*.projection`, `blocks.1?`, `*` (Python's `fnmatch`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import problem, show
from gpt2_fp8.config.schema import FP8PrecisionConfig, RunConfig

KEY = "precision.keep_bf16"
Part = str  # a name of PARTS
PARTS: tuple[Part, ...] = ("qkv", "projection", "fc1", "fc2")
ALL_PARTS = frozenset(PARTS)
NO_PARTS: frozenset[Part] = frozenset()
MLP = frozenset({"fc1", "fc2"})
_ENDS = re.compile(r"(first|last)(?::([0-9]{1,6}))?")


@dataclass(frozen=True)
class Kept:
    """What stays in bf16: the parts of each block, and whether the head does."""

    blocks: tuple[frozenset[Part], ...]
    head: bool

    def in_fp8(self, block: int) -> frozenset[Part]:
        """Return the parts of a block that compute in FP8."""
        return ALL_PARTS - self.blocks[block]


def parse_kept(names: Iterable[str], n_layer: int) -> Kept:
    """Return what `names` keep of a model of `n_layer` blocks. A name that fits nothing keeps nothing."""
    blocks: list[frozenset[Part]] = [NO_PARTS] * n_layer
    head = False
    for name in names:
        for block, parts in _find_named(name, n_layer):
            blocks[block] |= parts
        head = head or fnmatchcase("head", name)
    return Kept(tuple(blocks), head)


def fits_nothing(name: str, n_layer: int) -> bool:
    """Return whether a name is of no layer of a model of `n_layer` blocks."""
    return not fnmatchcase("head", name) and not any(True for _ in _find_named(name, n_layer))


def _find_named(name: str, n_layer: int) -> Iterator[tuple[int, frozenset[Part]]]:
    if end := _ENDS.fullmatch(name):
        count = int(end[2]) if end[2] else 1
        if count <= n_layer:
            yield from ((i if end[1] == "first" else n_layer - 1 - i, ALL_PARTS) for i in range(count))
        return
    for i in range(n_layer):
        words = {f"blocks.{i}": ALL_PARTS, f"blocks.{i}.mlp": MLP}
        words |= {f"blocks.{i}.{part}": frozenset({part}) for part in PARTS}
        if parts := NO_PARTS.union(*(parts for word, parts in words.items() if fnmatchcase(word, name))):
            yield i, parts


def partly(kept: Kept) -> str | None:
    """Name a block of which only a part is kept; None if there is none."""
    return next((f"blocks.{i}" for i, parts in enumerate(kept.blocks) if parts and parts != ALL_PARTS), None)


def every_block(kept: Kept) -> bool:
    """Return whether no product of any block computes in FP8."""
    return all(parts == ALL_PARTS for parts in kept.blocks)


def split_mlp(kept: Kept) -> str | None:
    """Name a block of whose MLP one product of two is kept; None if there is none."""
    return next((f"blocks.{i}" for i, parts in enumerate(kept.blocks) if len(parts & MLP) == 1), None)


def check(config: RunConfig) -> Iterator[Problem]:
    """Find names that are of no layer, and names that leave no layer in FP8."""
    precision, n_layer = config.precision, config.model.n_layer
    if not isinstance(precision, FP8PrecisionConfig):
        return
    for name in precision.keep_bf16:
        if fits_nothing(name, n_layer):
            reason = f"there is no layer {show(name)} in a model of {n_layer} blocks"
            remedy = f"head, first, last, first:2, blocks.0 to blocks.{n_layer - 1}, or a part such as blocks.*.mlp"
            yield problem(config, KEY, reason, remedy)
    if (asked := parse_kept(precision.keep_bf16, n_layer)).head and every_block(asked):
        yield problem(config, KEY, f"it keeps every layer in bf16; precision={precision.name} needs one in FP8")

"""What a configuration's `${...}` stand for, computed without writing them out.

A few lines that refer to each other can stand for more values than any machine can hold. So each value is weighed once,
with everything that it refers to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

MOST = 10_000  # values
LONGEST = 1 << 20  # characters
_FURTHEST = 100  # steps from value to value; OmegaConf takes no more, and reports longer chains
_OPENING = re.compile(r"\$\{([^${}]*)")

Path = tuple[Any, ...]  # keys, and places in lists


class Refused(NamedTuple):
    """A value whose references never end, or stand for too much."""

    key: str
    reason: str


class _Weight(NamedTuple):
    values: int
    characters: int


class _CircleError(Exception):
    """A value refers to itself."""

    def __init__(self, path: Path):
        self.path = path


def refused(plain: dict[str, Any]) -> Refused | None:
    """Return what in a configuration would take too much time or memory to resolve, or None.

    `plain` has the `${...}` as they are written.
    """
    scales = _Scales(plain)
    try:
        whole = scales.weigh(())
    except _CircleError as error:
        return Refused(_dotted(error.path), "its ${...} lead back to itself")
    if whole.values > MOST:
        return Refused(_dotted(scales.heaviest(0)), f"its ${{...}} come to more than {MOST:,} values")
    if whole.characters > LONGEST:
        return Refused(_dotted(scales.heaviest(1)), f"its ${{...}} come to more than {LONGEST:,} characters")
    return None


class _Scales:
    """Weighs the values of `plain`."""

    def __init__(self, plain: dict[str, Any]):
        self.plain = plain
        self._known: dict[Path, _Weight | None] = {}  # None: it is being weighed

    def weigh(self, path: Path, depth: int = 0) -> _Weight:
        """Return what the value at `path` comes to. Raises _CircleError."""
        if path in self._known:
            known = self._known[path]
            if known is None:
                raise _CircleError(path)
            return known
        if depth > _FURTHEST:  # the value there is weighed separately
            return _Weight(1, 0)
        self._known[path] = None
        node = self._at(path)
        parts: list[Path] = list(_members(node, path))
        if isinstance(node, str):
            parts += self._targets(_OPENING.findall(node), path)
        weights = [self.weigh(part, depth + 1) for part in parts]
        own = len(node) if isinstance(node, str) else 1
        weight = _Weight(1 + sum(w.values for w in weights), own + sum(w.characters for w in weights))
        self._known[path] = weight
        return weight

    def heaviest(self, by: int) -> Path:
        """Return the key that comes to the most: not an item of a list, but the list."""
        path: Path = ()
        while isinstance(self._at(path), dict) and (below := list(_members(self._at(path), path))):
            path = max(below, key=lambda part: self.weigh(part)[by])
        return path

    def _targets(self, texts: Iterable[str], path: Path, hops: int = 0) -> Iterator[Path]:
        """Yield the existing values that the `${...}` of a text at `path` refer to."""
        for inside in texts:
            resolver, colon, rest = inside.partition(":")
            words = [resolver]
            if colon and resolver.strip() == "hydra":
                words = [f"hydra.{rest.strip()}"]
            elif colon and resolver.strip() == "oc.select":
                words = [rest.partition(",")[0]]
            elif colon:  # other resolvers, which only the command line may have: every name in it
                words = re.findall(r"[\w.\[\]-]+", rest) if resolver.strip().startswith("oc.") else []
            for word in words:
                target = self._find(word.strip(), path, hops)
                if target is not None:
                    yield target

    def _find(self, word: str, path: Path, hops: int) -> Path | None:
        """Return where a reference at `path` leads, or None: `a.b[0]`, `.a`, `..a`.

        It may lead through other references: `a.b`, if `a: ${c}`.
        """
        up = len(word) - len(word.lstrip("."))
        place = path[:-up] if up else ()
        parts = [part for part in re.split(r"[.\[\]]+", word) if part]
        for part in parts:
            node = self._at(place)
            while isinstance(node, str):
                opening = _OPENING.match(node)
                if opening is None or hops == _FURTHEST:
                    return None
                hops += 1
                through = next(self._targets([opening[1]], place, hops), None)
                if through is None:
                    return None
                place, node = through, self._at(through)
            if isinstance(node, dict) and part in node:
                place = (*place, part)
            elif isinstance(node, (dict, list)) and re.fullmatch(r"[0-9]{1,9}", part) and _has(node, int(part)):
                place = (*place, int(part))
            else:
                return None
        return place if parts else None

    def _at(self, path: Path) -> Any:
        node: Any = self.plain
        for part in path:
            node = node[part]
        return node


def _has(node: Any, place: int) -> bool:
    return place in node if isinstance(node, dict) else place < len(node)


def _members(node: Any, path: Path) -> Iterator[Path]:
    if isinstance(node, (dict, list)):
        yield from ((*path, part) for part in (node if isinstance(node, dict) else range(len(node))))


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)

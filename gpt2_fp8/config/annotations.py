"""What a dataclass's annotations say of its keys: types, ranges, meanings, and which class of a union has which tag."""

from __future__ import annotations

from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from gpt2_fp8.config.ranges import Range

hints_of = cache(partial(get_type_hints, include_extras=True))


def meanings(cls: type) -> dict[str, str]:
    """Return the meaning of each key of `cls` that says one."""
    texts = {name: [m for m in _notes(hint) if isinstance(m, str)] for name, hint in hints_of(cls).items()}
    return {name: found[0] for name, found in texts.items() if found}


@cache
def members_of(hint: Any) -> list[Any]:
    """List the members of a union, each with its range; of any other type, itself."""
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return list(get_args(inner)) if get_origin(inner) in (Union, UnionType) else [hint]


@cache
def bare(member: Any) -> Any:
    """Return a type without what `Annotated` says of it or of its items."""
    member = get_args(member)[0] if get_origin(member) is Annotated else member
    return list[bare(get_args(member)[0])] if get_origin(member) is list else member  # type: ignore[misc]


@cache
def range_of(member: Any) -> Range | None:
    """Find the range that a type declares of itself or, if it is a list, of its items."""
    if found := next((note for note in _notes(member) if isinstance(note, Range)), None):
        return found
    inner = get_args(member)[0] if get_origin(member) is Annotated else member
    return range_of(get_args(inner)[0]) if get_origin(inner) is list else None


def tag_field(classes: list[Any]) -> str:
    """Find the field whose Literal tells the classes of a union apart."""
    shared = [name for name in hints_of(classes[0]) if all(tags_of(c, name) for c in classes)]
    choices = {name: [tag for c in classes for tag in tags_of(c, name)] for name in shared}
    tagging = [name for name, found in choices.items() if len(set(found)) == len(found)]
    assert len(tagging) == 1, f"one field must tell {classes} apart"
    return tagging[0]


@cache
def tags_of(cls: Any, field: str) -> tuple[str, ...]:
    """List the choices that a class stands for."""
    hint = hints_of(cls).get(field)
    return get_args(hint) if get_origin(hint) is Literal else ()


@cache
def _notes(hint: Any) -> tuple[Any, ...]:
    """Return what `Annotated` says of a type."""
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()

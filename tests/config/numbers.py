"""The numbers of a schema and the range that each declares."""

import typing
from dataclasses import is_dataclass

from gpt2_fp8.config.ranges import Range
from gpt2_fp8.config.schema import RunConfig


def ranges(cls, path=""):
    """Yield each number's key and its range, None where the schema declares none. A key of several classes comes once
    for each."""
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        yield from _of(hint, path + name)


def _of(hint, key, range_=None):
    notes = getattr(hint, "__metadata__", ())
    range_ = next((note for note in notes if isinstance(note, Range)), range_)
    hint = typing.get_args(hint)[0] if notes else hint
    if is_dataclass(hint):
        yield from ranges(hint, f"{key}.")
    elif hint in (int, float):
        yield key, range_
    elif typing.get_origin(hint) not in (typing.Literal, dict):  # tags are no settings
        for member in typing.get_args(hint):
            yield from _of(member, key)


RANGES = dict(ranges(RunConfig))
LIMITS = {key: (range_.limit, range_.unit) for key, range_ in RANGES.items() if range_ and range_.limit}

"""The sources of a run's text by their keys, and what is wrong with a mixture of several."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations

from gpt2_fp8.config import globs
from gpt2_fp8.config.data_schema import (
    DataConfig,
    FileOrHubData,
    FilesData,
    Mixed,
    MixtureData,
    TextOfARun,
    TokenFilesData,
)
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig

SMALLEST_SHARE = 1e-6  # a source that gives less than a sequence in a million is a mistake
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
_KEY = re.compile(r"(?<![\w./@])data\.(?!sources\.)(?=[a-z_]+\b)")


def sources_of(data: TextOfARun) -> list[tuple[str, Mixed]]:
    """Return every source of a run's text with its name in the mixture; the only one has the name ""."""
    return list(data.sources.items()) if isinstance(data, MixtureData) else [("", data)]


def with_sources(data: TextOfARun, sources: list[Mixed]) -> TextOfARun:
    """Return the same group with other sources, in the order of `sources_of`."""
    if isinstance(data, MixtureData):
        return replace(data, sources=dict(zip(data.sources, sources, strict=True)))
    return sources[0]


def without_validation(data: TextOfARun) -> TextOfARun:
    """Return the same group with no validation sequences."""
    return with_sources(data, [replace(source, val_sequences=0) for _, source in sources_of(data)])


def as_named(problem: Problem, name: str) -> Problem:
    """Return a source's problem in the words of the mixture that it is in: `data.repo` is `data.sources.web.repo`."""
    cause = _placed(problem.cause, name)
    remedy = re.sub(rf"\bdata=\w+ (?=data\.sources\.{name}\.)", "", _placed(problem.remedy, name))
    return Problem(cause if f"data.sources.{name}." in cause else f"source {name}: {cause}", remedy)


def found_in(finding: Finding, name: str) -> Finding:
    """Return a finding of a source, with its keys and words as in the mixture; unchanged for the name ""."""
    if not name:
        return finding
    return Finding(tuple(_placed(key, name) for key in finding.keys), as_named(finding.problem, name))


def shares(data: MixtureData) -> dict[str, float]:
    """Return each source's share of the sequences."""
    weights = weights_of(data)
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def weights_of(data: MixtureData) -> dict[str, float]:
    """Return each source's weight, in the order of the sources' names: 1 for all if none are given."""
    return {name: 1.0 if data.weights is None else data.weights[name] for name in sorted(data.sources)}


def check(config: RunConfig) -> Iterator[Finding]:
    """Find what is wrong with a mixture: its names, its weights, and what its sources must have in common."""
    data = config.data
    if not isinstance(data, MixtureData):
        return
    for name in data.sources:
        if not _NAME.fullmatch(name):
            cause = f"data.sources: {show(name)} is no name of a source"
            remedy = "begin with a letter, then letters, digits and _, 40 at most: +data@data.sources.web=fineweb"
            yield Finding(("data.sources",), Problem(cause, remedy))
    if len(data.sources) < 2:
        cause = f"data=mixture mixes two sources or more, and has {len(data.sources) or 'none'}"
        yield Finding(("data.sources",), Problem(cause, "+data@data.sources.web=fineweb adds one"))
    yield from _weights(data)
    yield from _in_common(data)
    if config.trainer.max_epochs is not None:
        cause = f"trainer.max_epochs={config.trainer.max_epochs}: each source of a mixture has passes of its own"
        remedy = "trainer.max_epochs=null, and the length as trainer.max_tokens=NUMBER or trainer.max_steps=NUMBER"
        yield Finding(("trainer.max_epochs", "data.kind"), Problem(cause, remedy))


def _weights(data: MixtureData) -> Iterator[Finding]:
    if data.weights is None or not data.sources:
        return
    for name in {*data.sources} - {*data.weights}:
        yield Finding.of("data.weights", f"data.weights: {show(name)} has none", "null gives all sources the same")
    for name, weight in data.weights.items():
        if name not in data.sources:
            yield Finding.of("data.weights", f"data.weights: there is no source {show(name)}")
        elif weight <= 0 or weight < SMALLEST_SHARE * sum(data.weights.values()):
            cause = f"data.weights: {show(name)}: {weight:g} is less than a sequence in a million"
            yield Finding.of("data.weights", cause)


def _in_common(data: MixtureData) -> Iterator[Finding]:
    names = list(data.sources)
    for name in names[1:]:
        first, other = data.sources[names[0]].tokenizer, data.sources[name].tokenizer
        if first != other:
            keys = f"data.sources.{names[0]}.tokenizer", f"data.sources.{name}.tokenizer"
            cause = f"{keys[0]}={show(first)}, {keys[1]}={show(other)}: a model has one tokenizer"
            yield Finding(keys, Problem(cause, f"{keys[1]}={show(first)}, or {keys[0]}={show(other)}"))
    texts = {name: _text(source) for name, source in data.sources.items()}
    for one, other in combinations(names, 2):
        if texts[one] == texts[other]:
            cause = f"data.sources.{one} and data.sources.{other} are the same text"
            yield Finding((f"data.sources.{other}",), Problem(cause, f"leave {other} out, and give {one} both weights"))


def _text(source: DataConfig) -> object:
    """Return what says which text a source is. Local files are told by their real paths, in any order."""
    about = {field.name: getattr(source, field.name) for field in fields(source)}
    if isinstance(source, (FilesData, TokenFilesData)):
        about |= {"train_files": _files(source.train_files), "val_files": _files(source.val_files)}
    if isinstance(source, FileOrHubData):
        about["path"] = _files([source.path])
    apart = ("name", "num_workers", "seed", "val_sequences", "cache_dir")
    return type(source), {key: str(value) for key, value in about.items() if key not in apart}


def _files(patterns: list[str]) -> list[str]:
    """Return the real paths of the files that `patterns` name, and each pattern that names none."""
    return sorted({name for word in patterns for name in [globs.real(path) for path in globs.find(word)] or [word]})


def _placed(text: str, name: str) -> str:
    return _KEY.sub(f"data.sources.{name}.", text)

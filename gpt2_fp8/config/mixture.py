"""The sources of a run's text by their keys, what is wrong with a mixture of several, and where documents end.

Text is tokenised here, and each of its documents ends with the separator, which `document_mask` has to know. A file of
ids has been made elsewhere. The documents of llm.c and modded-nanogpt begin with it, and those of nanoGPT end with it.
The header tells these apart.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path

from gpt2_fp8.config import disk
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

LLM_C, LLAMA_3 = 20240520, 20240801  # the magic numbers of llm.c's headers; `data/files.py` reads the rest
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
            yield Finding.of("data.sources", cause, "a letter, then letters, digits and _, 40 at most")
    if len(data.sources) < 2:
        cause = f"data=mixture mixes two sources or more, and has {len(data.sources) or 'none'}"
        yield Finding.of("data.sources", cause, "+data@data.sources.web=fineweb adds one")
    yield from _weights(data)
    yield from _in_common(data)
    if config.trainer.max_epochs is not None:
        cause = f"trainer.max_epochs={config.trainer.max_epochs}: each source of a mixture has passes of its own"
        yield Finding(("trainer.max_epochs", "data.kind"), Problem(cause))


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
            yield Finding(keys, Problem(cause))
    texts = {name: _text(source) for name, source in data.sources.items()}
    for one, other in combinations(names, 2):
        if texts[one] == texts[other]:
            cause = f"data.sources.{one} and data.sources.{other} are the same text"
            yield Finding.of(f"data.sources.{other}", cause)


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
    return sorted({name for word in patterns for name in [disk.real_path(path) for path in disk.find(word)] or [word]})


def _placed(text: str, name: str) -> str:
    return _KEY.sub(f"data.sources.{name}.", text)


def begin_with_separator(data: TextOfARun) -> bool:
    """Return whether the documents of a run's text begin with the separator. Reads 4 bytes of each file of ids."""
    return any(begins for _, source in sources_of(data) for begins, _ in _kinds(source))


def check_borders(config: RunConfig) -> Iterator[Finding]:
    """Find text for which no single rule says which document a separator belongs to."""
    if not config.document_mask:
        return
    seen: dict[bool, str] = {}
    for name, source in sources_of(config.data):
        key = f"data.sources.{name}.train_files" if name else "data.train_files"
        if of_llama := next((path for _, path in _kinds(source) if path and _magic(path) == LLAMA_3), None):
            cause = f"document_mask=true: documents begin with <|begin_of_text|> in {of_llama}, llm.c's for Llama 3"
            yield Finding(("document_mask", key), Problem(cause, "document_mask=false"))
            return
        for begins, path in _kinds(source):
            seen.setdefault(begins, str(path) if path else f"source {name}")
    if len(seen) > 1:
        cause = f"document_mask=true: documents begin with the separator in {seen[True]}, end with it in {seen[False]}"
        keys = "document_mask", "data.train_files", "data.val_files", "data.sources"
        yield Finding(keys, Problem(cause, "document_mask=false"))


def _kinds(source: Mixed) -> Iterator[tuple[bool, Path | None]]:
    """Yield, for each file of ids of a source, whether its documents begin with the separator; for text, False once."""
    if not isinstance(source, TokenFilesData):
        yield False, None
        return
    for pattern in [*source.train_files, *source.val_files]:
        for path in disk.find(pattern):
            if not disk.why_unreadable(path):  # else `paths` says it
                yield _magic(path) in (LLM_C, LLAMA_3), path


def _magic(path: Path) -> int:
    """Return the first number of a file; 0 if it has none."""
    try:
        with path.open("rb") as file:
            (number,) = struct.unpack("<i", file.read(4))
    except (OSError, struct.error):
        return 0
    return int(number)

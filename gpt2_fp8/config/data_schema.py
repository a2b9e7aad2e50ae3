"""The keys of the group `data`: a class for each kind of source, the mixture of several, and where documents end.

Text is tokenised here, and each of its documents ends with the separator, which `document_mask` has to know. A file of
ids has been made elsewhere. The documents of llm.c and modded-nanogpt begin with it, and those of nanoGPT end with it.
The header tells these apart.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from gpt2_fp8.config import disk, text_files
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import Part, Scored, Seed, Sequences, Workers, problem, show

LLM_C, LLAMA_3 = 20240520, 20240801  # the magic numbers of llm.c's headers; `data/files.py` reads the rest
SMALLEST_SHARE = 1e-6  # a source that gives less than a sequence in a million is a mistake
_SOURCES = ("data.sources",)
_OF_BORDERS = ("document_mask", "data.train_files", "data.val_files", "data.sources")
_NO_TEXT = ("name", "num_workers", "seed", "val_sequences", "cache_dir")  # keys that do not say which text it is
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
_KEY = re.compile(r"(?<![\w./@])data\.(?!sources\.)(?=[a-z_]+\b)")
_KEY_OF_SET = re.compile(r"(?<![\w./@])data\.(?:train_|val_)?(?=(?:files|repo|revision|text_column)\b)")


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """A text of `data.validation`, which is validated by itself. It has the tokenizer and the cache of `data`."""

    files: list[str] = field(default_factory=list)  # paths, folders or globs of text or .bin; of `repo`, inside it
    repo: str | None = None  # a data set of the hub; without files, its split `validation` or `test`
    revision: str = "main"  # of `repo`
    text_column: str = "text"
    sequences: Sequences = 256  # that are scored


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What every data set has."""

    name: str
    # gpt2, bytes, ORG/NAME of the hub's tokenizer.json, the path of one or of Llama 3's tokenizer.model, or of a folder
    tokenizer: str
    num_workers: Workers  # processes that read and tokenise; 0: in the training process. Never changes the order
    seed: Seed  # of the order of the text; follows `seed` unless set
    val_sequences: Scored  # sequences of the validation split that are scored, at most; 0: no validation
    # further texts by names of your own, each validated as val_loss/NAME: {NAME: {files: text}}
    validation: dict[str, ValidationSet] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TextData(DataConfig):
    """What every data set has that is tokenised."""

    cache_dir: str | None  # keep tokenised units here, and what a hub run needs to go on offline; null: keep nothing


@dataclass(frozen=True, kw_only=True)
class StdlibData(TextData):
    """The source of Python's standard library: real text that is on every machine."""

    kind: Literal["stdlib"]


@dataclass(frozen=True, kw_only=True)
class FilesData(TextData):
    """Local files of text: docs/data.md lists their kinds."""

    kind: Literal["files"]
    train_files: list[str]  # paths, folders or globs
    val_files: list[str]  # likewise; empty: `val_fraction` of the training files is held out
    val_fraction: Part
    text_column: str


@dataclass(frozen=True, kw_only=True)
class HubData(TextData):
    """A data set of the Hugging Face hub, streamed."""

    kind: Literal["hub"]
    repo: str
    revision: str  # best a commit hash; a branch is resolved at the start, and a resume is held to that commit
    train_files: list[str]  # paths or globs inside the repository; empty: its split `train`
    val_files: list[str]  # never trained on; without any, and without train_files, its split `validation` or `test`
    text_column: str


@dataclass(frozen=True, kw_only=True)
class FileOrHubData(HubData):
    """A single local text file where it exists, else the hub (tinyshakespeare)."""

    kind: Literal["file_or_hub"]  # type: ignore[assignment]
    path: str
    val_fraction: Part  # of the local file; the hub has a split of its own


@dataclass(frozen=True, kw_only=True)
class RegisteredData(TextData):
    """A source of text that a module of one's own has registered (`plugins`)."""

    kind: Literal["registered"]
    source: str  # the name that it was registered under


@dataclass(frozen=True, kw_only=True)
class TokenFilesData(DataConfig):
    """Files of token ids (.bin): nanoGPT's, llm.c's and modded-nanogpt's. `tokenizer` says what the ids mean."""

    kind: Literal["token_files"]
    train_files: list[str]  # paths, folders or globs
    val_files: list[str]  # likewise: a file is never split, since its ids do not tell where documents begin
    headerless: Literal["uint16", "uint32"]  # the ids of files without a header


Mixed = StdlibData | FilesData | HubData | FileOrHubData | TokenFilesData | RegisteredData  # a mixture has no mixture


@dataclass(frozen=True, kw_only=True)
class MixtureData:
    """Several sources. Each training sequence comes from one of them, in proportion to the weights."""

    name: str
    kind: Literal["mixture"]
    seed: Seed  # of the mixing; the order of each source follows its own
    weights: dict[str, float] | None  # by the sources' names, in any unit; null: all alike
    sources: dict[str, Mixed]
    validation: dict[str, ValidationSet] = field(default_factory=dict)  # as of any data

    @property
    def tokenizer(self) -> str:
        """Return the sources' tokenizer, which is the same for all."""
        return next(source.tokenizer for source in self.sources.values())

    @property
    def num_workers(self) -> int:
        """Return the worker processes of all sources, which read for any of them."""
        return sum(source.num_workers for source in self.sources.values())

    @property
    def val_sequences(self) -> int:
        """Return how many sequences a validation scores at most, over all sources."""
        return sum(source.val_sequences for source in self.sources.values())


TextOfARun = Mixed | MixtureData


def sources_of(data: TextOfARun) -> list[tuple[str, Mixed]]:
    """Return every source of a run's text with its name in the mixture; the only one has the name ""."""
    return list(data.sources.items()) if isinstance(data, MixtureData) else [("", data)]


def source_key(name: str) -> str:
    """Return the key of the source with this name, of those of `sources_of`."""
    return f"data.sources.{name}" if name else "data"


def with_sources(data: TextOfARun, sources: list[Mixed]) -> TextOfARun:
    """Return the same group with other sources, in the order of `sources_of`."""
    if isinstance(data, MixtureData):
        return replace(data, sources=dict(zip(data.sources, sources, strict=True)))
    return sources[0]


def without_validation(data: TextOfARun) -> TextOfARun:
    """Return the same group with no validation sequences."""
    data = replace(data, validation={})
    return with_sources(data, [replace(source, val_sequences=0) for _, source in sources_of(data)])


def sets_of(data: TextOfARun) -> list[tuple[str, Mixed]]:
    """Return each text of `data.validation` with its name, as a source that has this text alone."""
    own = [source for _, source in sources_of(data)]
    cache_dirs = [source.cache_dir for source in own if isinstance(source, TextData) and source.cache_dir]
    headerless = [source.headerless for source in own if isinstance(source, TokenFilesData)]
    found: list[tuple[str, Mixed]] = []
    for name, one in data.validation.items():
        about: dict[str, Any] = {"name": name, "tokenizer": data.tokenizer, "num_workers": 0, "seed": 0}
        about |= {"val_sequences": one.sequences, "train_files": [], "val_files": one.files}
        text = about | {"text_column": one.text_column, "cache_dir": cache_dirs[0] if cache_dirs else None}
        if one.repo is not None:
            text |= {"train_files": one.files, "val_files": []}  # so that no other file is asked for
            found.append((name, HubData(kind="hub", repo=one.repo, revision=one.revision, **text)))
        elif one.files and all(text_files.kind_of(file) == ("bin", "") for file in one.files):
            ids = headerless[0] if headerless else "uint16"
            found.append((name, TokenFilesData(kind="token_files", headerless=ids, **about)))
        else:
            found.append((name, FilesData(kind="files", val_fraction=0.0, **text)))
    return found


def as_named(problem: Problem, name: str) -> Problem:
    """Return a problem in the words of the mixture whose source has this `name`: `data.sources.web.repo`."""
    if not name:
        return problem
    cause, remedy, *keys = (_KEY.sub(f"data.sources.{name}.", text) for text in (*problem[:2], *problem.keys))
    return Problem(cause if f"data.sources.{name}." in cause else f"source {name}: {cause}", remedy, tuple(keys))


def as_of_set(problem: Problem, name: str) -> Problem:
    """Return a problem in the words of the text NAME of `data.validation`: `data.validation.NAME.files`."""
    key = f"data.validation.{name}"
    cause, remedy = (_KEY_OF_SET.sub(f"{key}.", text) for text in problem[:2])
    remedy = "" if "data.val_" in remedy else remedy  # which is for the run's own validation
    return Problem(cause if key in cause else f"{key}: {cause}", remedy, (key,))


def check_validation(data: TextOfARun) -> Iterator[Problem]:
    """Find what is wrong with the names and the keys of `data.validation`."""
    for name, source in sources_of(data) if isinstance(data, MixtureData) else ():
        if source.validation:
            yield Problem(f"data.sources.{name}.validation: the mixture has them all", "data.validation", _SOURCES)
    trained = {path for _, source in sources_of(data) for path in _trained_files(source)} if data.validation else set()
    for name, source in sets_of(data):
        one, key, reason = data.validation[name], f"data.validation.{name}", ""
        if not _NAME.fullmatch(name):
            reason = "a name is a letter, then letters, digits and _, 40 at most"
        elif name in dict(sources_of(data)):
            reason = f"val_loss/{name} is that of data.sources.{name}"
        elif not one.files and one.repo is None:
            reason = "it has neither files nor repo"
        elif one.repo is None and one.revision != ValidationSet.revision:
            reason = f"files of this machine have no revision {show(one.revision)}"
        elif both := sorted(trained & _real_paths(source, "val_files")):
            reason = f"the run trains on {both[0]}{f' and {len(both) - 1:,} more of its files' if both[1:] else ''}"
        if reason:
            yield Problem(f"{key}: {reason}", keys=(key,))
    if data.validation and data.val_sequences == 0:
        reason = "data.validation is scored beside the run's own validation"
        yield problem(data, "val_sequences", reason, prefix="data.")


def _trained_files(source: Mixed) -> set[str]:
    """Return the real paths of the local files that a source trains on."""
    if isinstance(source, FileOrHubData):
        return {os.path.realpath(Path(source.path).expanduser())}
    return _real_paths(source, "train_files") - _real_paths(source, "val_files")


def _real_paths(source: Mixed, key: str) -> set[str]:
    """Return the real paths of the local files that a key of a source names; of what names none, its own."""
    if not isinstance(source, (FilesData, TokenFilesData)):
        return set()
    kinds = text_files.OF_TEXT if isinstance(source, FilesData) else text_files.OF_IDS
    found = (text_files.find(pattern, kinds) or [Path(pattern)] for pattern in getattr(source, key))
    return {os.path.realpath(path) for paths in found for path in paths}


def weights_of(data: MixtureData) -> dict[str, float]:
    """Return each source's weight, in the order of the sources' names: 1 for all if none are given."""
    return {name: 1.0 if data.weights is None else data.weights[name] for name in sorted(data.sources)}


def check_mixture(data: TextOfARun) -> Iterator[Problem]:
    """Find what is wrong with a mixture: its names, its weights, and what its sources must have in common."""
    if not isinstance(data, MixtureData):
        return
    for name in data.sources:
        if not _NAME.fullmatch(name):
            cause = f"data.sources: {show(name)} is no name of a source"
            yield Problem(cause, "a letter, then letters, digits and _, 40 at most", _SOURCES)
    if len(data.sources) < 2:
        cause = f"data=mixture mixes two sources or more, and has {len(data.sources) or 'none'}: data.sources"
        yield Problem(cause, "+data@data.sources.web=fineweb adds one", _SOURCES)
    yield from _weights(data)
    yield from _in_common(data)


def _weights(data: MixtureData) -> Iterator[Problem]:
    weights = data.weights if data.weights is not None and data.sources else {}
    reasons = {name: "has none" for name in {*data.sources} - {*weights} if weights}
    reasons |= dict.fromkeys({*weights} - {*data.sources}, "is no source")
    for name, weight in weights.items():
        if weight <= 0 or weight < SMALLEST_SHARE * sum(weights.values()):
            reasons.setdefault(name, f"{weight:g} is less than a sequence in a million")
    for name, reason in reasons.items():
        yield Problem(f"data.weights: {show(name)}: {reason}", keys=("data.weights",))


def _in_common(data: MixtureData) -> Iterator[Problem]:
    """Find a second tokenizer, and a text that is two sources."""
    for (one, first), (other, second) in combinations(data.sources.items(), 2):
        if first.tokenizer != second.tokenizer:
            yield problem(data.sources, f"{one}.tokenizer {other}.tokenizer", "a model has one tokenizer",
                          prefix="data.sources.")  # fmt: skip
            return
        if _text(first) == _text(second):
            cause = f"data.sources.{one} and data.sources.{other} are the same text"
            yield Problem(cause, keys=(f"data.sources.{other}",))


def _text(source: Mixed) -> dict[str, object]:
    """Return what says which text a source is. Local files are told by their real paths, in any order."""
    about = {key: value for key, value in asdict(source).items() if key not in _NO_TEXT}
    if isinstance(source, (FilesData, TokenFilesData)):
        about |= {key: sorted(_real_paths(source, key)) for key in ("train_files", "val_files")}
    return about


def begin_with_separator(data: TextOfARun) -> bool:
    """Return whether the documents of a run's text begin with the separator. Reads 4 bytes of each file of ids."""
    return any(begins for _, source in sources_of(data) for begins, _ in _kinds(source))


def check_borders(data: TextOfARun) -> Iterator[Problem]:
    """Find text for which no single rule says which document a separator belongs to."""
    seen: dict[bool, str] = {}
    for name, source in [*sources_of(data), *sets_of(data)]:
        for begins, path in _kinds(source):
            if path and _magic(path) == LLAMA_3:
                cause = f"document_mask=true: documents begin with <|begin_of_text|> in {path}, llm.c's for Llama 3"
                yield Problem(cause, keys=_OF_BORDERS)
                return
            seen.setdefault(begins, str(path or f"source {name}"))
    if len(seen) > 1:
        cause = f"document_mask=true: documents begin with the separator in {seen[True]}, end with it in {seen[False]}"
        yield Problem(cause, keys=_OF_BORDERS)


def _kinds(source: Mixed) -> Iterator[tuple[bool, Path | None]]:
    """Yield, for each file of ids of a source, whether its documents begin with the separator; for text, False once."""
    if not isinstance(source, TokenFilesData):
        yield False, None
        return
    for pattern in [*source.train_files, *source.val_files]:
        for path in text_files.find(pattern, text_files.OF_IDS):
            if not disk.why_unreadable(path):  # else its path is refused
                yield _magic(path) in (LLM_C, LLAMA_3), path


def _magic(path: Path) -> int:
    """Return the first number of a file; of one that is shorter, another than a header's."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(4), "little", signed=True)

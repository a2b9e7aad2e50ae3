"""From the configuration to the sources of a run's text: their readers, their units in order, and their lanes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

from gpt2_fp8.config import data_schema
from gpt2_fp8.config.data_schema import (
    FileOrHubData,
    FilesData,
    Mixed,
    MixtureData,
    RegisteredData,
    StdlibData,
    TextData,
    TextOfARun,
    TokenFilesData,
)
from gpt2_fp8.config.errors import DataSourceLost, Problem, UserError
from gpt2_fp8.data.files import FilesSource, StdlibSource
from gpt2_fp8.data.hub import HubSource
from gpt2_fp8.data.mixing import Deal, MixedDeal, Mixing, Turns, column_count, lanes_of_share, whole_numbers
from gpt2_fp8.data.order import Order, lane_count
from gpt2_fp8.data.reader import UnitCache, UnitReader
from gpt2_fp8.data.token_files import TokenFilesSource
from gpt2_fp8.data.tokenizer import FileTokenizer, Tokenizer, fingerprint
from gpt2_fp8.data.units import Corpus, Source, Unit
from gpt2_fp8.runtime import registry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One source of a run's text, as it was asked for. The only source of a run has no name."""

    reader: UnitReader
    seed: int  # of its order
    val_sequences: int
    name: str = ""
    weight: int = 1


@dataclass(frozen=True)
class SourceStream:
    """One source of a run's text: its units in their order, and where they and its lanes begin among all sources'."""

    part: Part
    corpus: Corpus
    order: Order
    first_unit: int
    first_lane: int

    @property
    def name(self) -> str:
        """Return the source's name; the only source of a run has none."""
        return self.part.name

    def lanes(self) -> range:
        """Return the numbers of its lanes."""
        return range(self.first_lane, self.first_lane + self.order.lanes)


def build_parts(config: TextOfARun, encoding: Tokenizer, plugins: tuple[str, ...]) -> list[Part]:
    """Return every source that `config` names, sorted by name, with what reads it and its weight.

    Raises UserError as `build_reader` does.
    """
    if not isinstance(config, MixtureData):
        return [Part(build_reader(config, encoding, plugins), config.seed, config.val_sequences)]
    weights = data_schema.weights_of(config)
    parts = []
    for (name, _), weight in zip(weights.items(), whole_numbers(weights.values()), strict=True):
        source = config.sources[name]
        with naming_source(name):
            reader = build_reader(source, encoding, plugins)
        parts.append(Part(reader, source.seed, source.val_sequences, name, weight))
    return parts


def build_reader(config: Mixed, encoding: Tokenizer, plugins: tuple[str, ...]) -> UnitReader:
    """Return what reads the units of the source that `config` names. `plugins`: modules that workers import first.

    Raises UserError if its cache cannot be used, or if no plugin has registered the source.
    """
    cache = None
    if isinstance(config, TextData) and config.cache_dir is not None:
        joined = isinstance(encoding, FileTokenizer) and encoding.pieces is not None  # unlike in earlier versions
        key = fingerprint(encoding) + (", joined" if joined else "")
        cache = UnitCache(Path(config.cache_dir).expanduser(), key, encoding.n_vocab)
        cache.check()
    return UnitReader(build_source(config), config.tokenizer, cache, plugins)


def build_source(config: Mixed) -> Source | TokenFilesSource:
    """Return the source that `config` names. It reads nothing yet, but looks for a `file_or_hub`'s file.

    Raises UserError if no plugin has registered the source.
    """
    if isinstance(config, RegisteredData):
        return cast("Source", registry.make("data.source", config.source, Source, config))
    if isinstance(config, TokenFilesData):
        return TokenFilesSource(config.train_files, config.val_files, config.headerless)
    if isinstance(config, StdlibData):
        return StdlibSource()
    if isinstance(config, FilesData):
        return FilesSource(config.train_files, config.val_files, config.val_fraction, config.text_column)
    if isinstance(config, FileOrHubData) and Path(config.path).expanduser().is_file():
        return FilesSource([config.path], [], config.val_fraction, config.text_column)
    if isinstance(config, FileOrHubData):
        log.info("data: there is no file %s; reading %s from the hub", config.path, config.repo)
    cache_dir = None if config.cache_dir is None else Path(config.cache_dir).expanduser()
    return HubSource(
        config.repo, config.revision, config.train_files, config.val_files, config.text_column, cache_dir=cache_dir
    )


@contextmanager
def naming_source(name: str) -> Iterator[None]:
    """Enter a context in which a source is looked at: its errors then name it, and its keys as they are typed."""
    try:
        yield
    except UserError as error:
        if not name:
            raise
        raise UserError(data_schema.as_named(problem, name) for problem in error.problems) from error
    except DataSourceLost as error:
        if not name:
            raise
        raise DataSourceLost(f"source {name}: {error}") from error


# ---- units and lanes -------------------------------------------------------------------------------------------------


def find_units(part: Part) -> Corpus:
    """Find the units of a source. They have its name, by which `MixedReader` reads them."""
    with naming_source(part.name):
        corpus: Corpus = part.reader.source.corpus()
    if not part.name:
        return corpus
    train, val = ([replace(unit, source=part.name) for unit in units] for units in (corpus.train, corpus.val))
    return Corpus(train, val, corpus.about)


def join_corpora(parts: list[Part], corpora: list[Corpus]) -> Corpus:
    """Return the corpus of a run: its only source's, or the units of all sources in turn.

    Raises UserError if a source would train on a file that another one validates with.
    """
    if len(corpora) == 1:
        return corpora[0]
    train = [unit for corpus in corpora for unit in corpus.train]
    scored = [unit for part, corpus in zip(parts, corpora, strict=True) if part.val_sequences for unit in corpus.val]
    check_overlap(train, scored)
    about: dict[str, str | int] = {"kind": "mixture", "sources": ", ".join(part.name for part in parts)}
    return Corpus(train, [unit for corpus in corpora for unit in corpus.val], about)


def check_overlap(train: list[Unit], held_out: list[Unit]) -> None:
    """Compare what all sources train on with what they validate with. Raises UserError for each file of both."""
    real = cache(lambda path: str(Path(path).resolve()))
    held: dict[tuple[str, str], dict[str, Unit]] = {}  # of each file, by source: the first unit that is held out
    for unit in sorted(held_out, key=lambda unit: unit.start):
        held.setdefault((real(unit.path), unit.version), {}).setdefault(unit.source, unit)
    found = set()
    for unit in train if held else ():
        for source, first in held.get((real(unit.path), unit.version), {}).items():
            # Documents are split by their content: those of a training side are none of a fraction that is not larger.
            by_document = (unit.side, first.side) == ("train", "val") and first.val_fraction <= unit.val_fraction
            if source != unit.source and not by_document and first.start < max(unit.stop, unit.start + 1):
                found.add((unit.path, unit.source, source))
    if found:
        raise UserError(
            Problem(f"source {one} trains on {path}, and source {other} validates with it")
            for path, one, other in sorted(found)
        )


def order_units(parts: list[Part], corpora: list[Corpus], global_batch_size: int) -> list[SourceStream]:
    """Order the units of every source, and give it its lanes."""
    streams: list[SourceStream] = []
    first_unit = first_lane = 0
    for part, corpus in zip(parts, corpora, strict=True):
        units = len(corpus.train)
        if len(parts) == 1:
            lanes = lane_count(global_batch_size, units)
        else:
            whole = sum(other.weight for other in parts)
            lanes = lanes_of_share(column_count(global_batch_size), units, part.weight, whole)
        streams.append(SourceStream(part, corpus, Order(part.seed, units, lanes), first_unit, first_lane))
        first_unit, first_lane = first_unit + units, first_lane + lanes
    return streams


def build_deal(streams: list[SourceStream], global_batch_size: int, seed: int) -> Deal:
    """Return the deal of the sequences of global batches to the lanes of all sources."""
    if len(streams) == 1:
        return Turns(streams[0].order.lanes, global_batch_size)
    mixing = Mixing([stream.part.weight for stream in streams], column_count(global_batch_size), seed)
    return MixedDeal(mixing, [stream.order.lanes for stream in streams], global_batch_size)

"""From the configuration to the sources of a run's text: their readers, their units in order, and their lanes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

from gpt2_fp8.config import data_schema
from gpt2_fp8.config.data_schema import (
    FileOrHubData,
    FilesData,
    HubData,
    Mixed,
    MixtureData,
    RegisteredData,
    StdlibData,
    TextData,
    TextOfARun,
    TokenFilesData,
)
from gpt2_fp8.config.errors import DataSourceLost, Problem, UserError
from gpt2_fp8.config.run_length import largest_divisor
from gpt2_fp8.data.files import FilesSource, StdlibSource, TokenFilesSource
from gpt2_fp8.data.hub import HubSource
from gpt2_fp8.data.order import Deal, Mixing, Order, lane_count, lanes_of_share, whole_numbers
from gpt2_fp8.data.reader import UnitCache, UnitReader
from gpt2_fp8.data.tokenizer import FileTokenizer, Tokenizer, fingerprint
from gpt2_fp8.data.units import Corpus, Source, Unit
from gpt2_fp8.runtime import registry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValidatedText:
    """A text of `data.validation`, or a source's: what reads it, and how many of its held-out sequences are scored."""

    name: str  # the only source of a run has none
    reader: UnitReader
    corpus: Corpus
    val_sequences: int


@dataclass(frozen=True)
class SourceStream(ValidatedText):
    """One source of a run's text: its units in their order, and where they and its lanes begin among all sources'."""

    order: Order
    weight: int
    first_unit: int
    first_lane: int

    def lanes(self) -> range:
        """Return the numbers of its lanes."""
        return range(self.first_lane, self.first_lane + self.order.lanes)


def build_streams(config: TextOfARun, encoding: Tokenizer) -> list[SourceStream]:
    """Find the units of every source that `config` names, and order them, in one lane each. Sorted by name.

    Raises UserError if text is missing, a cache cannot be used, no plugin has registered a source, or a source would
    train on a file that another one validates with; DataSourceLost if a source does not answer.
    """
    sources: dict[str, Mixed] = {"": config} if not isinstance(config, MixtureData) else config.sources
    shares = data_schema.weights_of(config) if isinstance(config, MixtureData) else {"": 1.0}
    weights = dict(zip(shares, whole_numbers(shares.values()), strict=True))
    streams: list[SourceStream] = []
    first_unit = 0
    for name, weight in weights.items():
        source = sources[name]
        with naming_source(name):
            reader = build_reader(source, encoding)
            found: Corpus = reader.source.corpus()
            train, val = ([replace(unit, source=name) for unit in units] for units in (found.train, found.val))
            if not train:
                raise UserError.of("the training text is too short: 0 tokens in 0 documents")
        order, corpus, first_lane = Order(source.seed, len(train), 1), Corpus(train, val, found.about), len(streams)
        streams.append(SourceStream(name, reader, corpus, source.val_sequences, order, weight, first_unit, first_lane))
        first_unit += len(train)
    if len(streams) > 1:
        check_overlap(
            [unit for stream in streams for unit in stream.corpus.train],
            [unit for stream in streams if stream.val_sequences for unit in stream.corpus.val],
        )
    return streams


def build_sets(config: TextOfARun, encoding: Tokenizer) -> list[ValidatedText]:
    """Find the units of every text of `data.validation`. Raises as `build_streams`."""
    found = []
    for name, source in data_schema.sets_of(config):
        with naming_source(name, data_schema.as_of_set):
            reader = build_reader(source, encoding)
            corpus = reader.source.corpus()
            named = isinstance(source, HubData) and source.train_files
            units = [replace(unit, source=name) for unit in (corpus.train if named else corpus.val)]
        found.append(ValidatedText(name, reader, Corpus([], units), source.val_sequences))
    return found


def build_reader(config: Mixed, encoding: Tokenizer) -> UnitReader:
    """Return what reads the units of the source that `config` names. Raises as `build_streams`."""
    cache = None
    if isinstance(config, TextData) and config.cache_dir is not None:
        joined = isinstance(encoding, FileTokenizer) and encoding.pieces is not None  # unlike in earlier versions
        key = fingerprint(encoding) + (", joined" if joined else "")
        cache = UnitCache(Path(config.cache_dir).expanduser(), key, encoding.n_vocab)
        cache.check()
    return UnitReader(build_source(config), config.tokenizer, cache)


def build_source(config: Mixed) -> Source | TokenFilesSource:
    """Return the source that `config` names. It reads nothing yet, but looks for a `file_or_hub`'s file."""
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
def naming_source(name: str, rename: Callable[[Problem, str], Problem] = data_schema.as_named) -> Iterator[None]:
    """Enter a context in which a source is looked at: its errors then name it, and its keys as they are typed."""
    try:
        yield
    except (UserError, DataSourceLost) as error:
        if not name:
            raise
        if isinstance(error, DataSourceLost):
            raise DataSourceLost(f"source {name}: {error}") from error
        raise type(error)(rename(problem, name) for problem in error.problems) from error


def join_corpora(streams: list[SourceStream]) -> Corpus:
    """Return the corpus of a run: its only source's, or the units of all sources in turn."""
    if len(streams) == 1:
        return streams[0].corpus
    train, val = ([unit for stream in streams for unit in getattr(stream.corpus, side)] for side in ("train", "val"))
    return Corpus(train, val, {"kind": "mixture", "sources": ", ".join(stream.name for stream in streams)})


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


def deal_lanes(
    streams: list[SourceStream], global_batch_size: int, seed: int, most: int
) -> tuple[list[SourceStream], Deal]:
    """Return the streams in their lanes, up to `most` in each, and the deal of global batches to these."""
    units, weights = [stream.order.n_units for stream in streams], [stream.weight for stream in streams]
    if len(streams) > 1:
        columns, whole = largest_divisor(global_batch_size, most), sum(weights)
        lanes = [lanes_of_share(columns, n, weight, whole, most) for n, weight in zip(units, weights, strict=True)]
    else:
        lanes = [lane_count(global_batch_size, units[0], most)]
        columns = lanes[0]
    deal = Deal(Mixing(weights, columns, seed), lanes, global_batch_size)
    orders = [Order(stream.order.seed, n, own) for stream, n, own in zip(streams, units, lanes, strict=True)]
    dealt = zip(streams, orders, deal.first, strict=True)
    return [replace(stream, order=order, first_lane=first) for stream, order, first in dealt], deal

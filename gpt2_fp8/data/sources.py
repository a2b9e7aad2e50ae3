"""From the configuration to the source of units."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gpt2_fp8.config import mixture
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
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.data import files, hub, retry, stdlib, token_format
from gpt2_fp8.data.cache import UnitCache
from gpt2_fp8.data.files import ALL_HELD_OUT, both_sides
from gpt2_fp8.data.ids import Tokens
from gpt2_fp8.data.mixing import whole_numbers
from gpt2_fp8.data.progress_log import ProgressLog
from gpt2_fp8.data.reader import UnitReader
from gpt2_fp8.data.retry import LOCAL_WAITS
from gpt2_fp8.data.strands import Part, told_of
from gpt2_fp8.data.tokenizer import fingerprint
from gpt2_fp8.data.tokenizer_files import FileTokenizer, Tokenizer
from gpt2_fp8.data.units import Corpus, IdSource, Source, Unit
from gpt2_fp8.runtime import registry


@dataclass
class TokenFilesSource:
    """Files by path or glob, as `token_format` reads them. A unit is a range of a file, and its ids stay in order.

    `headerless`: the dtype of the ids of files without a header, `uint16` or `uint32`.
    """

    train_files: list[str]
    val_files: list[str]
    headerless: str
    waits: tuple[float, ...] = LOCAL_WAITS

    def corpus(self) -> Corpus:
        """Return the units of all files, in the order of the patterns and of the sorted names within each.

        Raises UserError: every pattern without a match, and every file that is none of token ids.
        """
        problems: list[Problem] = []
        train, val = both_sides(self.train_files, self.val_files, (token_format.ENDING,), problems)
        looking = ProgressLog("looking into files", len(train) + len(val))
        for done, path in enumerate([*train, *val]):
            looking.at(done)
            problems += token_format.problems(path, self.headerless)
        if val and not train and not problems:
            problems.append(ALL_HELD_OUT)
        if problems:
            raise UserError(problems)
        about: dict[str, str | int] = {"kind": "token_files", "files": len(train) + len(val)}
        return Corpus(self._units(train), self._units(val), about)

    def read_ids(self, unit: Unit, vocab_size: int) -> Tokens:
        """Return the unit's ids, [n], in the dtype of the vocabulary. Raises UserError for an id outside of it."""
        return token_format.read(unit, self.headerless, vocab_size)

    def count(self, unit: Unit) -> int:
        """Return how many ids the unit has."""
        form = token_format.form_of(Path(unit.path), self.headerless)
        return token_format.count(unit, form.dtype)

    def _units(self, paths: list[Path]) -> list[Unit]:
        return [unit for path in paths for unit in token_format.units(path, self.headerless)]


log = logging.getLogger(__name__)

DataSettings = TextOfARun


def build_parts(config: DataSettings, encoding: Tokenizer, plugins: tuple[str, ...]) -> list[Part]:
    """Return every source that `config` names, sorted by name, with what reads it and its weight.

    Raises UserError as `build_reader` does.
    """
    if not isinstance(config, MixtureData):
        return [Part(build_reader(config, encoding, plugins), config.seed, config.val_sequences)]
    weights = mixture.weights_of(config)
    parts = []
    for (name, _), weight in zip(weights.items(), whole_numbers(weights.values()), strict=True):
        source = config.sources[name]
        with told_of(name):
            reader = build_reader(source, encoding, plugins)
        parts.append(Part(reader, source.seed, source.val_sequences, name, weight))
    return parts


def build_reader(config: Mixed, encoding: Tokenizer, plugins: tuple[str, ...]) -> UnitReader:
    """Return what reads the units of the source that `config` names. `plugins`: modules that workers import first.

    Raises UserError if its cache cannot be used, or if no plugin has registered the source.
    """
    cache, tokenizer = None, fingerprint(encoding)
    if isinstance(config, TextData) and config.cache_dir is not None:
        joined = isinstance(encoding, FileTokenizer) and encoding.pieces is not None  # unlike in earlier versions
        key = f"{tokenizer}, joined" if joined else tokenizer
        cache = UnitCache(Path(config.cache_dir).expanduser(), key, encoding.n_vocab)
        cache.check()
    return UnitReader(build_source(config), config.tokenizer, cache, plugins, tokenizer)


def build_source(config: Mixed) -> Source | IdSource:
    """Return the source that `config` names. It reads nothing yet, but looks for a `file_or_hub`'s file.

    Raises UserError if no plugin has registered the source.
    """
    if isinstance(config, RegisteredData):
        return cast("Source", registry.make("data.source", config.source, Source, config))
    if isinstance(config, TokenFilesData):
        return TokenFilesSource(config.train_files, config.val_files, config.headerless)
    if isinstance(config, StdlibData):
        return stdlib.StdlibSource()
    if isinstance(config, FilesData):
        return files.FilesSource(config.train_files, config.val_files, config.val_fraction, config.text_column)
    if isinstance(config, FileOrHubData) and Path(config.path).expanduser().is_file():
        return files.FilesSource([config.path], [], config.val_fraction, config.text_column)
    if isinstance(config, FileOrHubData):
        log.info("data: there is no file %s; reading %s from the hub", config.path, config.repo)
    cache_dir = None if config.cache_dir is None else Path(config.cache_dir).expanduser()
    return hub.HubSource(
        config.repo, config.revision, config.train_files, config.val_files, config.text_column,
        waits=retry.HUB_WAITS, cache_dir=cache_dir,
    )  # fmt: skip

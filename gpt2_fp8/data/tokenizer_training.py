"""A byte-level BPE, trained on the training text that a `data` group names, by the library `tokenizers`.

As GPT-2's (Radford et al. 2019): its pattern cuts text into pieces, and bytes are merged within a piece. All text has
ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_fp8.config import data_schema, tokenizer_file
from gpt2_fp8.config.data_schema import Mixed, MixtureData, TextOfARun, sources_of
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.order import permutation
from gpt2_fp8.data.reader import with_retries
from gpt2_fp8.data.sources import build_source, naming_source
from gpt2_fp8.data.tokenizer import dtype_of
from gpt2_fp8.data.units import DocumentCounts, Source, Unit, clean, cut, on_side
from gpt2_fp8.data.workers import ProgressLog


class TrainingText:
    """Up to `megabytes` of the training text, piece by piece: of each source of a mixture its share by the weights.

    Units are drawn in the order of the run's first epoch: a part of them is a sample of all files.

    Attributes: `size` and `documents`, the bytes in UTF-8 and the number of what was read so far.
    """

    def __init__(self, data: TextOfARun, megabytes: int):
        self.data, self.most = data, megabytes * 10**6
        self.size = self.documents = 0

    def __iter__(self) -> Iterator[str]:
        weights = data_schema.weights_of(self.data) if isinstance(self.data, MixtureData) else {"": 1.0}
        for name, config in sources_of(self.data):
            stop = self.size + self.most * weights[name] / sum(weights.values())
            with naming_source(name):
                for text in self._read_units(config):
                    if self.size >= stop:
                        break
                    self.documents += 1
                    self.size += len(text.encode())
                    yield from cut(text)

    def _read_units(self, config: Mixed) -> Iterator[str]:
        source = build_source(config)
        assert isinstance(source, Source), "files of ids have no text"
        units = source.corpus().train
        progress = ProgressLog("reading text, units", len(units))
        for done, place in enumerate(permutation(len(units), config.seed, 0, 0)):
            progress.at(done)
            unit = units[place]
            documents, _ = with_retries(partial(_read, source, unit), unit.name, source.waits)
            yield from documents


def _read(source: Source, unit: Unit) -> list[str]:
    counts = DocumentCounts()
    texts = (clean(document, counts) for document in source.read(unit, counts))
    return [text for text in texts if text is not None and on_side(text, unit)]


def train(text: TrainingText, vocab_size: int, end: str, folder: Path) -> np.dtype[np.unsignedinteger]:
    """Write a tokenizer of `vocab_size` ids to `folder`; returns the dtype of its ids. `end`, id 0, ends a document.

    Raises UserError if `end` may be merged from text or there are not so many ids, as a run for text that cannot be
    read, and OSError.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if len(made.pre_tokenizer.pre_tokenize_str(end)) < 2:
        raise UserError.of(f"--end {end}: a word of a text may be merged to the same token", "--end '<|endoftext|>'")
    options: dict[str, Any] = {"special_tokens": [end], "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(text, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    if (ids := made.get_vocab_size()) != vocab_size:
        cause = f"--vocab-size {vocab_size}: a byte-level BPE of {text.size:,} bytes of text has {ids:,} ids"
        raise UserError.of(cause, f"--vocab-size {ids}" + (", or more text" if ids < vocab_size else ""))
    beside = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / tokenizer_file.CONFIG).write_text(json.dumps(beside, ensure_ascii=False, indent=1), encoding="utf-8")
    made.save(str(folder / tokenizer_file.FILES[0]))
    return dtype_of(vocab_size)

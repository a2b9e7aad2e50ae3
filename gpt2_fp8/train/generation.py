"""Texts from a trained model: what `generate` writes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from gpt2_fp8.config import data_schema, programs
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.programs import GenerateConfig
from gpt2_fp8.data.tokenizer import TextStream
from gpt2_fp8.engine.out_of_memory import is_out_of_memory
from gpt2_fp8.fp8.resolve import plain_plan
from gpt2_fp8.model.decoder import Decoder
from gpt2_fp8.model.generate import End, Sampling, Text, decode_after, go_on
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.train import trained

_TOKENS = 200  # of a text whose number of tokens is not given, if the context has room for them


@dataclass(frozen=True)
class Written:
    """A text that has ended."""

    prompt: str
    sample: int
    text: str
    tokens: int  # how many were drawn, without the one that ended it
    ended: End


class Generation:
    """A model, its tokenizer and the beginnings that it shall go on with. Raises UserError for what cannot be used."""

    def __init__(self, config: GenerateConfig):
        self.config, self.device = config, _device(config.device)
        assert config.ckpt_path is not None, "checked before"
        found = trained.load(config.ckpt_path, config.checkpoint, config.weights)
        if config.tokenizer is not None:  # as if the run's lay there
            sources = [source for _, source in data_schema.sources_of(found.config.data)]
            sources = [replace(source, tokenizer=config.tokenizer) for source in sources]
            data = data_schema.with_sources(found.config.data, sources)
            found = found._replace(config=replace(found.config, data=data))
        self.path, self.weights = found.path, found.of
        wanted = config.precision if config.precision != "auto" else ("bf16" if self.device == "cuda" else "fp32")
        self.dtype = torch.bfloat16 if wanted == "bf16" else torch.float32
        remedy = "tokenizer=PATH of the one that it was trained with"
        self.tokenizer = trained.tokenizer_of(found, found.config.data.tokenizer, remedy)
        self.prompts = programs.beginnings(config, [])
        self._typed = list(map(self.tokenizer.encode_ordinary, self.prompts))
        separator = [self.tokenizer.eot_token]
        self._ids = [ids if text else separator for text, ids in zip(self.prompts, self._typed, strict=True)]
        if problems := list(self._misfits(found.config.model.n_positions)):
            raise UserError(problems)
        # In plain torch.
        model = plain_plan(found.config, self.device).backend.build(vocabulary(found.config))
        model.load_state_dict(dict(found.weights))
        model.separator_begins = found.step.get("separator_begins", model.separator_begins)
        self.model: GPT2 = model.to(device=self.device, dtype=self.dtype).eval()

    def write(self, say: Callable[[str], object]) -> Iterator[Written]:
        """Write all texts, `batch_size` at a time, in the order of their beginnings and samples.

        `say` gets a text piece by piece as it is drawn, if no other one is written with it.
        """
        asked = [(place, sample) for place in range(len(self.prompts)) for sample in range(self.config.samples)]
        for first in range(0, len(asked), self.config.batch_size):
            batch = asked[first : first + self.config.batch_size]
            try:
                yield from self._batch(batch, say)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                less = f"batch_size={len(batch) // 2}" if len(batch) > 1 else "device=cpu, or fewer tokens"
                raise UserError.of(f"{len(batch)} texts together do not fit into memory", less) from None

    def _batch(self, batch: list[tuple[int, int]], say: Callable[[str], object]) -> Iterator[Written]:
        config, tokenizer = self.config, self.tokenizer
        texts = [self._text(place, sample) for place, sample in batch]
        longest = max(len(text.prompt) + text.most for text in texts)
        decoder = Decoder(self.model, len(texts), min(self.model.config.n_positions, longest))
        sampling = Sampling(config.temperature, config.top_k, config.top_p)
        ids, end = min(self.model.vocab_size, tokenizer.n_vocab), tokenizer.eot_token if config.stop else None
        stream, seen = TextStream(tokenizer, self._typed[batch[0][0]]), 0
        for _ in go_on(decoder, texts, sampling, ids, end):
            if len(texts) == 1:
                say(stream.add(texts[0].ids[seen:]))
                seen = len(texts[0].ids)
        if len(texts) == 1:
            say(stream.end())
        for text, (place, sample) in zip(texts, batch, strict=True):
            assert text.ended is not None
            drawn = decode_after(tokenizer.decode, self._typed[place], text.ids)
            yield Written(self.prompts[place], sample, drawn, len(text.ids), text.ended)

    def _text(self, place: int, sample: int) -> Text:
        """Return a text to write. Its seed depends on its beginning and not on those beside it."""
        config, ids = self.config, self._ids[place]
        seed = zlib.crc32(f"{config.seed}/{sample}/{self.prompts[place]}".encode())
        most = _TOKENS if config.slide else min(_TOKENS, _room(len(ids), self.model.config.n_positions))
        return Text(ids, seed, most if config.tokens is None else config.tokens)

    def _misfits(self, n_positions: int) -> Iterator[Problem]:
        for number, (prompt, ids) in enumerate(zip(self.prompts, self._ids, strict=True), 1):
            named = f"prompt {number} ({show(prompt)})" if len(self.prompts) > 1 else f"the prompt ({show(prompt)})"
            room, tokens = _room(len(ids), n_positions), self.config.tokens or 1
            if not ids:
                yield Problem(f"{named} has no token of the tokenizer", "give it a word that the tokenizer knows")
            elif not self.config.slide and tokens > room:
                cause = f"tokens={tokens}: {named} has {len(ids):,} of the model's {n_positions:,} positions"
                fits = f"tokens={room} or less; or " if room > 0 else ""
                yield Problem(cause, f"{fits}slide=true, which goes on with the newest half of the context")


def _room(prompt: int, n_positions: int) -> int:
    """Return how many tokens fit behind a beginning: the last one needs no position."""
    return n_positions - prompt + 1


def _device(asked: str) -> Literal["cuda", "cpu"]:
    if asked == "gpu" and not torch.cuda.is_available():
        raise UserError.of("device=gpu, and torch sees no CUDA GPU here", "device=cpu, or device=auto")
    return "cpu" if asked == "cpu" or not torch.cuda.is_available() else "cuda"

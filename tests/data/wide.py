"""A made-up tokenizer of 128,256 ids, none of those that text comes to below 65,536, in this process and in workers."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

import tiktoken

from gpt2_fp8.data import reader
from gpt2_fp8.data.reader import UnitReader, WorkCounts
from gpt2_fp8.data.units import TokenisedUnit, Unit

N_VOCAB = 128_256
SHIFT = N_VOCAB - 257  # a byte's id, and end of text's, is so much larger than that of the tokenizer `bytes`


@cache
def wide() -> tiktoken.Encoding:
    """Return it. What fills the lower ids begins with a byte that no text has."""
    fill = {b"\xff" + i.to_bytes(3): i for i in range(SHIFT)}
    return tiktoken.Encoding(
        "wide",
        pat_str=r"[\s\S]{1,64}",
        mergeable_ranks=fill | {bytes([value]): SHIFT + value for value in range(256)},
        special_tokens={"<|endoftext|>": N_VOCAB - 1},
        explicit_n_vocab=N_VOCAB,
    )


class WideReader(UnitReader):
    """A UnitReader of this tokenizer, whatever name it was given."""

    def __call__(self, unit: Unit) -> tuple[TokenisedUnit, WorkCounts]:
        with patch.object(reader, "load_tokenizer", lambda name: wide()):
            return super().__call__(unit)

"""Token ids: their dtype, and the check that none is outside the vocabulary.

A GPU would read, and write, past the end of a table for such an id. The number of ids determines the dtype, and all
code that makes, keeps or reads tokens asks here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.config.shown import printable

Tokens = npt.NDArray[np.unsignedinteger]  # uint16 or uint32, as `dtype_of` says


def dtype_of(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the dtype of the ids 0 to `vocab_size` - 1: uint16 if all fit, else uint32.

    A batch has them as int32, so no vocabulary has more than 2^31. Raises ValueError for a larger one.
    """
    if not 0 < vocab_size <= 1 << 31:
        raise ValueError(f"no vocabulary has {vocab_size:,} ids")
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def narrowed(ids: npt.NDArray[np.integer], vocab_size: int, unit: str) -> Tokens:
    """Return `ids` in the dtype of their vocabulary. Raises UserError for an id of `unit` that is not in it.

    The check comes first: a cast would turn an id that is too large into another one, and a valid one.
    """
    check_unit(ids, vocab_size, unit)
    return ids.astype(dtype_of(vocab_size), copy=False)


def little_endian(tokens: Tokens) -> Tokens:
    """Return `tokens` in the byte order of files and digests, on any machine."""
    return tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)


def check_unit(tokens: npt.NDArray[np.integer], vocab_size: int, unit: str) -> None:
    """Check a unit's tokens. Raises UserError for an id that no tokenizer of `vocab_size` ids can give."""
    if (odd := _beyond(tokens, 0, vocab_size)) is not None:
        raise UserError.of(
            f"{printable(unit)}: its tokens have the id {odd} of a vocabulary of {vocab_size:,}",
            "the tokenizer's files are damaged, or this machine's memory is: run with data.cache_dir=null elsewhere",
        )


def check_batch(ids: npt.NDArray[np.int32], vocab_size: int, lowest: int = 0) -> None:
    """Check a batch. Raises RunError for an id below `lowest` or outside the vocabulary.

    Its units had no such id when they were read, so the memory in which they waited is at fault. The check takes a
    tenth of a millisecond, while the GPU is still busy with the last step's update.
    """
    if (odd := _beyond(ids, lowest, vocab_size)) is not None:
        raise RunError(
            f"a batch has the id {odd} of a vocabulary of {vocab_size:,}, and the text had none: this machine's memory "
            "is not to be trusted",
            lead="; better on another machine: ",
        )


def _beyond(ids: npt.NDArray[np.integer], lowest: int, vocab_size: int) -> int | None:
    if not ids.size:
        return None
    if lowest == 0 and ids.dtype == np.int32 and ids.view(np.uint32).max() < vocab_size:
        return None  # one pass is enough: as uint32, a negative id is large
    smallest, largest = int(ids.min()), int(ids.max())
    return smallest if smallest < lowest else largest if largest >= vocab_size else None

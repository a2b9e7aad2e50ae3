"""Token ids: how wide they are kept, and that none is beyond the vocabulary.

On a GPU such an id would be read, and written, past the end of a table. The dtype follows from the number of ids alone,
and everything that makes, keeps or reads tokens asks here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.config.shown import printable

Tokens = npt.NDArray[np.unsignedinteger]  # uint16 or uint32, as `dtype_of` says


def dtype_of(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the dtype of the ids 0 to `vocab_size` - 1: uint16 where all fit, uint32 beyond.

    A batch has them as int32, so no vocabulary has more than 2^31. Raises ValueError for a larger one.
    """
    if not 0 < vocab_size <= 1 << 31:
        raise ValueError(f"no vocabulary has {vocab_size:,} ids")
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def narrowed(ids: npt.NDArray[np.integer], vocab_size: int, unit: str) -> Tokens:
    """Return `ids` in the dtype of their vocabulary. Raises UserError for an id of `unit` that is not in it.

    The look comes first: a cast alone would make another id, and a valid one, of what is too large.
    """
    check_unit(ids, vocab_size, unit)
    return ids.astype(dtype_of(vocab_size), copy=False)


def little_endian(tokens: Tokens) -> Tokens:
    """Return `tokens` with the byte order of files and digests, whatever this machine's is."""
    return tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)


def check_unit(tokens: npt.NDArray[np.integer], vocab_size: int, unit: str) -> None:
    """Raises UserError for a unit's tokens that no tokenizer of `vocab_size` ids can have given."""
    if (odd := _beyond(tokens, 0, vocab_size)) is not None:
        raise UserError.of(
            f"{printable(unit)}: its tokens have the id {odd} of a vocabulary of {vocab_size:,}",
            "the tokenizer's files are damaged, or this machine's memory is: run with data.cache_dir=null elsewhere",
        )


def check_batch(ids: npt.NDArray[np.int32], vocab_size: int, lowest: int = 0) -> None:
    """Raises RunError for a batch with an id below `lowest` or beyond the vocabulary. Its units had none when they were
    read, so this is of the memory in which they have waited; a batch's numbers take a tenth of a millisecond to look
    at, while the GPU still has the last step's update to do."""
    if (odd := _beyond(ids, lowest, vocab_size)) is not None:
        raise RunError(
            f"a batch has the id {odd} of a vocabulary of {vocab_size:,}, and the text had none: this machine's memory "
            "is not to be trusted; under the same run_name, ckpt_path=last continues, better on another machine"
        )


def _beyond(ids: npt.NDArray[np.integer], lowest: int, vocab_size: int) -> int | None:
    if not ids.size:
        return None
    if lowest == 0 and ids.dtype == np.int32 and ids.view(np.uint32).max() < vocab_size:
        return None  # in one pass: a negative one is large
    smallest, largest = int(ids.min()), int(ids.max())
    return smallest if smallest < lowest else largest if largest >= vocab_size else None

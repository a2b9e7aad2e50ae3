"""What is read before training starts.

That is enough of the training text to know that there is some, and all validation sequences.
"""

from __future__ import annotations

import numpy as np

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.documents import said_replaced
from gpt2_fp8.data.ids import Tokens
from gpt2_fp8.data.prefetch import UnitPool
from gpt2_fp8.data.progress_log import ProgressLog
from gpt2_fp8.data.units import DocumentCounts, Unit


def check_trainable(units: list[Unit], pool: UnitPool, n_positions: int) -> None:
    """Read `units` until they make one block.

    Raises:
        UserError: the first is in another encoding than UTF-8; or all of them make less than one block, since the
            corpus is empty, or shorter than one sequence.
    """
    tokens, counts = 0, DocumentCounts()
    looking = ProgressLog("looking for text to train on, units", len(units))
    for done, unit in enumerate(units):
        looking.at(done)
        tokenised = pool.take(pool.ask(unit))
        if tokenised.replaced and not done:
            raise UserError.of(said_replaced(unit, tokenised), "convert its file to UTF-8")
        tokens, counts = tokens + len(tokenised.tokens), counts + tokenised.counts
        if tokens > n_positions:
            return
    skipped = ", ".join(f"{n} {name}" for name, n in counts.as_dict().items() if n and name != "read")
    raise UserError.of(
        f"the training text is too short: {tokens} tokens in {counts.read} documents"
        f"{f' (and {skipped})' if skipped else ''}, but one sequence takes model.n_positions + 1 = {n_positions + 1}",
        "give more text, or make model.n_positions smaller",
    )


def validation_blocks(units: list[Unit], pool: UnitPool, n_positions: int, count: int) -> Tokens:
    """Return the first `count` blocks of `units` in natural order: [<= count, n_positions + 1], uint16 or uint32.

    Raises:
        UserError: there is not even one.
    """
    wanted = count * n_positions + 1
    ahead = [pool.ask(unit) for unit in units[: pool.num_workers + 1]]
    parts: list[Tokens] = []
    length = 0
    looking = ProgressLog(f"reading {count:,} validation sequences, units", len(units))
    for i in range(len(units)):
        looking.at(i)
        if length >= wanted:
            break
        tokenised = pool.take(ahead.pop(0))
        parts.append(tokenised.tokens)
        length += len(parts[-1])
        if (next_ := i + pool.num_workers + 1) < len(units):
            ahead.append(pool.ask(units[next_]))
    for ticket in ahead:
        pool.drop(ticket)
    n_blocks = min(count, (length - 1) // n_positions)
    if n_blocks < 1:
        more = "hold out more, such as data.val_fraction=0.2 or data.val_files='[FILE]'"
        if not units:
            more += " (the latter for short .txt files, of which data.val_fraction takes whole lines at the end)"
        raise UserError.of(
            f"the validation text is too short: {length} tokens in {len(units)} units, but one sequence takes "
            f"model.n_positions + 1 = {n_positions + 1}",
            f"{more}; or do without: data.val_sequences=0",
        )
    tokens = np.concatenate(parts)
    starts = np.arange(n_blocks)[:, None] * n_positions
    return tokens[starts + np.arange(n_positions + 1)]

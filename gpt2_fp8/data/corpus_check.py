"""What is read before training starts.

That is enough of the training text to know that there is some, and all validation sequences.
"""

from __future__ import annotations

import numpy as np

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.ids import Tokens
from gpt2_fp8.data.prefetch import UnitPool
from gpt2_fp8.data.progress_log import ProgressLog
from gpt2_fp8.data.units import DocumentCounts, Unit


def check_trainable(units: list[Unit], pool: UnitPool, n_positions: int) -> None:
    """Read `units` until they make one block.

    Raises:
        UserError: all of them make less than one block: the corpus is empty, or shorter than one sequence.
    """
    tokens, counts = 0, DocumentCounts()
    looking = ProgressLog("looking for text to train on, units", len(units))
    for done, unit in enumerate(units):
        looking.at(done)
        tokenised = pool.take(pool.ask(unit))
        tokens, counts = tokens + len(tokenised.tokens), counts + tokenised.counts
        if tokens > n_positions:
            return
    skipped = ", ".join(f"{n} {name}" for name, n in counts.as_dict().items() if n and name != "read")
    raise UserError.of(
        f"the training text is too short: {tokens} tokens in {counts.read} documents"
        f"{f' (and {skipped})' if skipped else ''}, but one sequence takes model.n_positions + 1 = {n_positions + 1}",
        _of_skipped(counts) or "give more text, or make model.n_positions smaller",
    )


def _of_skipped(counts: DocumentCounts) -> str | None:
    """Return the remedy where most documents were skipped, so that more of them would not help; None elsewhere."""
    others = counts.read + counts.empty
    if counts.broken > max(others, counts.not_text):
        return 'repair the files, whose lines are to be JSON objects such as {"text": TEXT}; or give others'
    if counts.not_text > others:
        return "set data.text_column to a column, or a key of JSON lines, that holds text; or give other files"
    return None


def validation_blocks(units: list[Unit], pool: UnitPool, n_positions: int, count: int) -> Tokens:
    """Return the first `count` blocks of `units` in natural order: [<= count, n_positions + 1], uint16 or uint32.

    Raises:
        UserError: there is not even one.
    """
    wanted = count * n_positions + 1
    ahead = [pool.ask(unit) for unit in units[: pool.num_workers + 1]]
    parts: list[Tokens] = []
    length, counts = 0, DocumentCounts()
    looking = ProgressLog(f"reading {count:,} validation sequences, units", len(units))
    for i in range(len(units)):
        looking.at(i)
        if length >= wanted:
            break
        tokenised = pool.take(ahead.pop(0))
        parts.append(tokenised.tokens)
        counts += tokenised.counts
        length += len(parts[-1])
        if (next_ := i + pool.num_workers + 1) < len(units):
            ahead.append(pool.ask(units[next_]))
    for ticket in ahead:
        pool.drop(ticket)
    n_blocks = min(count, (length - 1) // n_positions)
    if n_blocks < 1:
        own_files = all(unit.side == "all" for unit in units)  # elsewhere it counts what the other side skipped, too
        more = "hold out more, such as data.val_fraction=0.2 or data.val_files='[FILE]'"
        if not units:
            more += " (the latter for short .txt files, of which data.val_fraction takes whole lines at the end)"
        remedy = (own_files and _of_skipped(counts)) or more
        raise UserError.of(
            f"the validation text is too short: {length} tokens in {len(units)} units, but one sequence takes "
            f"model.n_positions + 1 = {n_positions + 1}",
            f"{remedy}; or do without: data.val_sequences=0",
        )
    tokens = np.concatenate(parts)
    starts = np.arange(n_blocks)[:, None] * n_positions
    return tokens[starts + np.arange(n_positions + 1)]

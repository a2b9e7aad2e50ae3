"""How many tokens one pass over the training text has, by reading all of it.

`trainer.max_epochs` is counted in these.
"""

from __future__ import annotations

from collections import deque

from gpt2_fp8.config.data_schema import MixtureData, TextOfARun
from gpt2_fp8.data.corpus_check import check_trainable
from gpt2_fp8.data.prefetch import UnitPool
from gpt2_fp8.data.progress_log import ProgressLog
from gpt2_fp8.data.sources import build_reader
from gpt2_fp8.data.tokenizer import load_tokenizer
from gpt2_fp8.data.units import IdSource, Unit


def tokens_a_pass(config: TextOfARun, n_positions: int, plugins: tuple[str, ...] = ()) -> int:
    """Count the tokens of the training text that `config` names. With a `cache_dir` they are kept for the training.

    Raises:
        UserError: the text is missing, unreadable, or shorter than a sequence of `n_positions` and its last target.
        DataSourceLost: the source does not answer.
    """
    assert not isinstance(config, MixtureData), "each of its sources has passes of its own"
    reader = build_reader(config, load_tokenizer(config.tokenizer), plugins)
    pool = UnitPool(reader, config.num_workers)
    try:
        units = reader.source.corpus().train
        source = reader.source
        tokens = sum(map(source.count, units)) if isinstance(source, IdSource) else _count(units, pool)
        if tokens <= n_positions:
            check_trainable(units, pool, n_positions)  # raises
        return tokens
    finally:
        pool.close()


def _count(units: list[Unit], pool: UnitPool) -> int:
    """Read every unit once, in worker processes if there are any; returns the number of their tokens."""
    counting = ProgressLog("counting the tokens of an epoch, units", len(units))
    ahead = deque(pool.ask(unit) for unit in units[: pool.num_workers + 1])
    tokens = 0
    for done in range(len(units)):
        counting.at(done)
        tokens += len(pool.take(ahead.popleft()).tokens)
        if (next_ := done + pool.num_workers + 1) < len(units):
            ahead.append(pool.ask(units[next_]))
    return tokens

"""The host memory of training on a CPU, and which micro-batch fits it; also the memory of a step's text, for a GPU too.

A GPU reports by itself what does not fit. A CPU starts to swap, or the kernel kills the process without a message. So
the memory is estimated before anything is built.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import replace
from typing import Literal, NamedTuple

from gpt2_fp8.config import hints
from gpt2_fp8.config.block_spec import BlockSpec, block_spec
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.out_of_memory import largest_divisor
from gpt2_fp8.model.flops import parameter_count
from gpt2_fp8.model.gpt2 import padded_vocabulary
from gpt2_fp8.model.optimizer_bytes import optimizer_bytes
from gpt2_fp8.runtime import memory_limits

log = logging.getLogger(__name__)

PROCESS_BYTES = 400 << 20  # libraries, text, and the processes that read it
PARAMETER_BYTES = 4 * 3  # in float32: it, its gradient, and its copy in a save
STATES = 2  # of the optimizer: its own, and its copy in a save
KEPT_BYTES = 4  # a token and channel of what a block keeps for its backward (`_kept_channels`)
LOGIT_BYTES = 4 * 4  # a logit: with padding, without it, its softmax, its gradient
SCORE_BYTES = 4 * 4  # a pair of tokens and a head: attention with dropout keeps them all
MASK_BYTES = 4 + 4 + 1  # a pair of tokens, once for all layers: the documents' mask while it is made
ID_BYTES = 4  # a token
AGAIN = 4.5  # times what a block keeps: one that is computed again as a whole, with its gradients; 4.3 was measured
EMULATED = 1.8  # times as much a sequence where FP8 is emulated; 1.3 was measured
STEPS_HELD = {"cpu": 2, "cuda": 4}  # this step's ids and the next one's while they are read; a GPU's also page-locked
USED = 0.9  # of what is left now
USED_BY_RANKS = 0.75  # of the whole, which is the same for all ranks
LEAST_FIXED, LEAST_SEQUENCE = 0.55, 0.75  # of the estimate: the least that any run was measured to take


class Footprint(NamedTuple):
    """Bytes of a process: a fixed part, and a part for each sequence of the micro-batch."""

    fixed: int
    sequence: int

    def of(self, sequences: int) -> int:
        """Return the bytes with a micro-batch of `sequences`."""
        return self.fixed + sequences * self.sequence

    def least(self, sequences: int) -> float:
        """Return the least bytes that any run was measured to take with a micro-batch of `sequences`."""
        return LEAST_FIXED * self.fixed + LEAST_SEQUENCE * sequences * self.sequence

    def most(self, left: float) -> int:
        """Return the most sequences for which `left` bytes are enough; 0: not even one."""
        return max(int((left - self.fixed) // self.sequence), 0)


def footprint(config: RunConfig, vocab_size: int) -> Footprint:
    """Estimate a run on a CPU: an upper bound, 1.2 to 1.6 times what was measured."""
    model, padded_vocab_size = config.model, padded_vocabulary(vocab_size)
    parameters = parameter_count(model, padded_vocab_size)
    tokens = model.n_positions
    attention, mlp = (tokens * channels * KEPT_BYTES for channels in _kept_channels(block_spec(model)))
    if model.dropout:
        attention += SCORE_BYTES * model.n_head * tokens**2
    kept = _kept(config, attention, mlp) + (MASK_BYTES * tokens**2 if config.document_mask else 0)
    emulated = isinstance(config.precision, FP8PrecisionConfig) and config.precision.backend == "emulated"
    casts = 2 * parameters if config.precision.name == "bf16" or emulated else 0
    sequence = kept + LOGIT_BYTES * tokens * padded_vocab_size
    if emulated:
        sequence = int(EMULATED * sequence)
    state = optimizer_bytes(config.optimizer, model, padded_vocab_size)
    return Footprint(PROCESS_BYTES + PARAMETER_BYTES * parameters + STATES * state + casts, sequence)


def _kept(config: RunConfig, attention: int, mlp: int) -> int:
    """Return the bytes that all blocks keep, and what one of them computes again, of a sequence."""
    always, again = {
        "none": (attention + mlp, 0),
        "mlp": (attention, mlp),
        "full": (config.model.n_positions * config.model.n_embd * KEPT_BYTES, int(AGAIN * (attention + mlp))),
    }[config.activation_checkpointing]
    return config.model.n_layer * always + again


def _kept_channels(spec: BlockSpec) -> tuple[int, int]:
    """Count the channels of all tensors that a block keeps for its backward, of a token: attention's, and the MLP's."""
    heads, mlp = spec.heads, spec.mlp
    turned = heads.queries + heads.keys if heads.qk_norm or spec.positions != "learned" else 0
    normalised = heads.queries + heads.keys if heads.qk_norm else 0
    rms = spec.n_embd if spec.norm.kind == "rms_norm" else 0  # torch's RMSNorm keeps its result before the weight
    activated = mlp.width if mlp.kind == "gelu" else 2 * mlp.width  # SwiGLU keeps the gate's SiLU too
    attention = 3 * spec.n_embd + 2 * heads.queries + heads.packed + turned + normalised + rms
    return attention, spec.n_embd + mlp.projected + activated + rms


def step_bytes(config: RunConfig, share: int, on: Literal["cuda", "cpu"]) -> int:
    """Return the bytes of text that a process holds: some steps, of `share` sequences each."""
    return (STEPS_HELD[on] + config.trainer.overfit_batches) * share * (config.model.n_positions + 1) * ID_BYTES


def check_step(config: RunConfig, vocab_size: int, ranks: int, share: int, on: Literal["cuda", "cpu"]) -> None:
    """Raise UserError if a step's text does not fit the host's memory, while the model alone would."""
    limit = memory_limits.narrowest()
    if limit is None:
        return
    left = _left(limit, ranks) + memory_limits.swap_bytes() / ranks
    room = left - (footprint(config, vocab_size).least(1) if on == "cpu" else 0)
    held = step_bytes(config, share, on)
    if held <= room or room <= 0:  # room <= 0: `fitted` says it better
        return
    micro = config.micro_batch if config.micro_batch < share else 1
    fits = max(int(room * USED / held * share) // micro, 1) * micro * (config.global_batch_size // share)
    also = f", or fewer of trainer.overfit_batches={n}" if (n := config.trainer.overfit_batches) else ""
    raise UserError.of(
        f"global_batch_size={config.global_batch_size}: the text of its steps takes {_size(held)} of each process, and "
        f"{_size(max(room, 0))} of the memory of {limit.what} are to be had for it",
        f"global_batch_size={fits}{also}",
    )


def fitted(
    config: RunConfig, vocab_size: int, ranks: int, share: int, typed: bool, keys: Container[str] = ()
) -> RunConfig:
    """Return `config` with a micro-batch that fits the memory of `ranks` processes: a divisor of `share`.

    It is never larger than before, and the log says if it is smaller. `typed`: the user wants this one and no other.
    `keys`: what the command line sets. Raises UserError if that one cannot fit, or none.
    """
    limit, needed, asked = memory_limits.narrowest(), footprint(config, vocab_size), config.micro_batch
    if limit is None:
        return config
    left = _left(limit, ranks) - step_bytes(config, share, "cpu")
    most = needed.most(left * USED if ranks == 1 else left)
    if most >= asked:
        return config
    fits, wanted = largest_divisor(share, most) if most else 1, asked if typed else 1
    if needed.least(wanted) > left + memory_limits.swap_bytes() / ranks:
        each = f" by each of {ranks} ranks" if ranks > 1 else ""
        smaller = f"micro_batch_size={fits}" if most else _smaller_model(keys)
        remedies = [limit.lift] if limit.lift and not most else [smaller, limit.lift]
        have = f"{_size(left)} of the memory of {limit.what} are to be had"
        if left < 1 << 20:
            have = f"nothing of the {_size(limit.whole)} of {limit.what} is left"
        raise UserError.of(
            f"micro_batch_size={wanted} needs about {_size(needed.of(wanted))}, and {have}{each}",
            "; or ".join(filter(None, remedies)),
        )
    if typed:
        return config
    log.warning(
        "micro_batch_size %d instead of %d: it needs about %s of the %s that %s has left",
        fits, asked, _size(needed.of(fits)), _size(left), limit.what,
    )  # fmt: skip
    return replace(config, micro_batch_size=fits)


def _smaller_model(keys: Container[str]) -> str:
    """Return how the model becomes smaller: by the sizes that were typed, or by another choice."""
    sizes = [f"model.{name}" for name in ("n_layer", "n_embd", "n_positions", "vocab_size") if f"model.{name}" in keys]
    return (
        f"a smaller {hints.either(sizes)}" if sizes else "a smaller model (model=tiny), or a shorter model.n_positions"
    )


def _left(limit: memory_limits.Limit, ranks: int) -> float:
    """Return the bytes that each of a machine's ranks may take."""
    return (limit.left if ranks == 1 else limit.whole * USED_BY_RANKS) / ranks


def _size(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"

"""Whether a case can fit into this machine's memory at all, and what to say about one that did not.

On a CPU, running out of memory is no error: the system swaps, or ends other programs. So a case that cannot fit is not
started. A GPU reports itself what does not fit, but the host must hold a step's tokens too.
"""

from __future__ import annotations

import re

from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.measure.subprocesses import one_line
from gpt2_fp8.model.flops import parameter_count
from gpt2_fp8.model.optimizer_bytes import optimizer_bytes
from gpt2_fp8.runtime.memory_limits import machine_bytes

PARAMETER_BYTES = 8  # a parameter in float32, and its gradient
LOGIT_BYTES, TOKEN_BYTES = 4, 4  # a float32 and an int32


def too_large(config: RunConfig, device: str, steps: int) -> str | None:
    """Return why `steps` steps of a case cannot fit, in one line; None if they may, or if the memory is not known.

    It compares a lower bound: the largest part that must be in memory as a whole.
    """
    whole = machine_bytes()
    needed, what = max(_parts(config, device, steps))
    if whole is None or needed <= whole:
        return None
    return f"needs about {_gib(needed)} for {what}, and this machine has {_gib(whole)}"


def wanted(error: BaseException) -> str:
    """Return what an allocator's error says, in one line."""
    asked = re.search(r"tried to allocate ([\d.]+) (bytes|[KMGTP]iB)", str(error), re.IGNORECASE)
    if asked is None:
        return one_line(error) or "memory ran out"
    if asked[2] != "bytes":
        return f"wanted {asked[1]} {asked[2]} more"
    whole = machine_bytes()  # the host's allocator reports bytes
    return f"wanted {_gib(int(asked[1]))} more" + (f", and this machine has {_gib(whole)}" if whole else "")


def _parts(config: RunConfig, device: str, steps: int) -> list[tuple[int, str]]:
    """List the parts that must be in the machine's memory: bytes and a description."""
    model, rows = config.model, vocabulary(config)
    tokens = TOKEN_BYTES * config.global_batch_size * (model.n_positions + 1)
    if device == "cuda":
        return [(tokens, "the tokens of a step")]
    state = optimizer_bytes(config.optimizer, model, rows)
    logits = LOGIT_BYTES * config.micro_batch * model.n_positions * rows
    return [
        (PARAMETER_BYTES * parameter_count(model, rows) + state, "parameters, gradients and optimizer state"),
        (logits, "the logits of a forward pass"),
        (tokens * steps, f"the tokens of {steps} steps"),
    ]


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"

"""Whether a case can fit into this machine's memory at all, and what is said of one that did not.

A CPU's memory ends in the system's swap, or in the end of other programs, and not in an error; so a case that cannot
fit is not started. A GPU says by itself what does not fit, but the tokens of a step are laid out on the host.
"""

from __future__ import annotations

import re

from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.measure.subprocesses import one_line
from gpt2_fp8.model.flops import parameter_count
from gpt2_fp8.runtime.memory_limits import machine_bytes

TRAINED = 16  # bytes of a parameter in float32, its gradient and its two moments
LOGIT, TOKEN = 4, 4  # bytes of a float32 and of an int32


def too_large(config: RunConfig, device: str, steps: int) -> str | None:
    """Why `steps` steps of a case cannot fit, in one line; None where they may, or this machine's memory is not known.

    A lower bound: what is largest of its parts, each of which lies in memory as a whole.
    """
    whole = machine_bytes()
    needed, what = max(_parts(config, device, steps))
    if whole is None or needed <= whole:
        return None
    return f"needs about {_gib(needed)} for {what}, and this machine has {_gib(whole)}"


def wanted(error: BaseException) -> str:
    """What an error of an allocator says, in one line."""
    asked = re.search(r"tried to allocate ([\d.]+) (bytes|[KMGTP]iB)", str(error), re.IGNORECASE)
    if asked is None:
        return one_line(error) or "memory ran out"
    if asked[2] != "bytes":
        return f"wanted {asked[1]} {asked[2]} more"
    whole = machine_bytes()  # the host's allocator counts in bytes
    return f"wanted {_gib(int(asked[1]))} more" + (f", and this machine has {_gib(whole)}" if whole else "")


def _parts(config: RunConfig, device: str, steps: int) -> list[tuple[int, str]]:
    """The bytes of each part that lies in the machine's memory, and what it is."""
    model, rows = config.model, vocabulary(config)
    tokens = TOKEN * config.global_batch_size * (model.n_positions + 1)
    if device == "cuda":
        return [(tokens, "the tokens of a step")]
    logits = LOGIT * config.micro_batch * model.n_positions * rows
    return [
        (TRAINED * parameter_count(model, rows), "parameters, gradients and moments"),
        (logits, "the logits of a forward pass"),
        (tokens * steps, f"the tokens of {steps} steps"),
    ]


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"

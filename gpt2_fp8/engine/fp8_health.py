"""The health of a run's FP8 tensors: what its scales say at any time, and what a sampled pass says now and then.

Reading the stored scales costs one copy to the host. A sampled pass costs a forward and backward of a sequence or a
few. Both are between two steps, and neither changes a number of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from gpt2_fp8.engine.out_of_memory import is_out_of_memory
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.fp8.fp8_tensors import KINDS, FP8Tensor, Stored, StoredScales, headroom
from gpt2_fp8.fp8.sampled_pass import SampledPass
from gpt2_fp8.runtime.moments import Sent

TOKENS = 1024  # of a sampled pass, at least, if a micro-batch has as many


@dataclass(frozen=True)
class Health:
    """One FP8 tensor at one step. None: not known at that step, or under that recipe.

    Attributes:
        amax: the largest absolute value, of the newest step if scales are stored, else of the sampled sequences.
        scale: the factor before the cast; of a recipe with several a tensor, the smallest.
        headroom: powers of two between amax times scale and the format's largest number; negative if it saturates.
        saturated, flushed: shares of the sampled values that are not 0.
        age: steps since the largest amax that is remembered.
        jump: log2 of the scale over that of the reading before.
    """

    tensor: FP8Tensor
    amax: float
    scale: float
    headroom: float
    saturated: float | None = None
    flushed: float | None = None
    age: int | None = None
    jump: float | None = None


class FP8Health:
    """Observes the FP8 tensors of a training step's model. Only the rank that logs needs one, unless it is divided.

    Attributes:
        failed: why there are no more sampled passes; None while there are.
    """

    def __init__(self, step: TrainingStep):
        self._step, self._pass = step, SampledPass(step.plan.backend, step.model)
        self.tensors = self._pass.tensors
        self._stored: StoredScales | None = None
        self._before: dict[FP8Tensor, float] = {}  # scales of the last reading
        self.failed: str | None = None

    @property
    def stored(self) -> StoredScales:
        """What reads the scales. Transformer Engine's layers have them from their first forward on."""
        if self._stored is None or len(self._stored.found) == 0:
            self._stored = StoredScales(self._step.model, self.tensors)
        return self._stored

    def send(self) -> Sent | None:
        """Send the stored scales to the host, at the end of a step; None under a recipe without."""
        share, size = self._step.share, self._step.micro_batch_size
        return self.stored.send(-(-share // size)) if self.stored.found else None

    def read(self, sent: Sent | None = None) -> list[Health]:
        """Read what `send` has sent, or else the stored scales; empty under a recipe without.

        If nothing is `sent`, call it after a step that is settled.
        """
        sent = sent or self.send()
        found = {} if sent is None else self.stored.receive(sent)
        return [self._of_stored(tensor, stored) for tensor, stored in found.items()]

    def _of_stored(self, tensor: FP8Tensor, stored: Stored) -> Health:
        before = self._before.get(tensor)
        self._before[tensor] = stored.scale
        known = before is not None and before > 0 and stored.scale > 0
        jump = math.log2(stored.scale / before) if known and before is not None else None
        left = headroom(tensor, stored)
        return Health(tensor, stored.amax, stored.scale, left, age=stored.age, jump=jump)

    def sample(self, ids: Tensor, stored: Sequence[Health]) -> list[Health]:
        """Observe every FP8 tensor in a pass over a few of a step's sequences; complete what `read` has `stored`.

        ids: int32 [sequences, n_positions + 1], a rank's share of a step. Without memory for it, `failed` says so,
        and the result is empty.
        """
        share, micro_batch, reader = self._step.share, self._step.micro_batch_size, self.stored
        size = min(len(ids), micro_batch, -(-TOKENS // (ids.shape[1] - 1)))
        try:
            scales = dict(zip(reader.found, reader.scales().unbind(), strict=True)) if reader.found else {}
            made = self._pass(ids[:size], share, micro_batch, scales)
            found = dict(zip(made, torch.stack(list(made.values())).tolist(), strict=True)) if made else {}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._step.exchange.give_up()
            self.failed = str(error).partition("\n")[0]
            return []
        known = {health.tensor: health for health in stored}
        healths = []
        for tensor in (tensor for tensor in self.tensors if tensor in found):
            amax, scale, saturated, flushed = found[tensor]
            health = known.get(tensor) or Health(tensor, amax, scale, headroom(tensor, Stored(amax, scale, 0)))
            healths.append(replace(health, saturated=saturated, flushed=flushed))
        return healths


def summary(healths: Iterable[Health]) -> dict[str, float]:
    """Summarize the tensors for the loggers, kind by kind; what is not known is left out, and so are the logits.

    - `fp8/amax_KIND`: the largest; `fp8/scale_KIND`: the median; `fp8/headroom_KIND`: the smallest;
    - `fp8/saturated_KIND` and `fp8/flushed_KIND`: the largest share;
    - `fp8/scale_jump`: the largest change of a scale since the last reading, in powers of two;
    - `fp8/scale_age`: the largest, in steps.
    """
    all_of = [health for health in healths if not health.tensor.of_logits]
    found: dict[str, float] = {}
    for kind in KINDS:
        of_kind = [health for health in all_of if health.tensor.kind == kind]
        if of_kind:
            found[f"fp8/amax_{kind}"] = max(health.amax for health in of_kind)
            found[f"fp8/scale_{kind}"] = median(health.scale for health in of_kind)
            found[f"fp8/headroom_{kind}"] = min(health.headroom for health in of_kind)
        for share in ("saturated", "flushed"):
            shares = [value for health in of_kind if (value := getattr(health, share)) is not None]
            if shares:
                found[f"fp8/{share}_{kind}"] = max(shares)
    if jumps := [abs(health.jump) for health in all_of if health.jump is not None]:
        found["fp8/scale_jump"] = max(jumps)
    if ages := [health.age for health in all_of if health.age is not None]:
        found["fp8/scale_age"] = float(max(ages))
    return found

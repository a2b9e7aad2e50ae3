"""The types that several keys have: numbers with the range that they must be in."""

from __future__ import annotations

from typing import Annotated

from gpt2_fp8.config.ranges import Refusal, above_zero, above_zero_to_one, at_least, below_one, from_to

Count = Annotated[int, at_least(1)]
Steps = Annotated[int, at_least(0)]
Seed = Annotated[int, from_to(0, 2**32 - 1, "choose another seed, such as 1337")]
Part = Annotated[float, below_one()]
KeptPart = Annotated[float, below_one("0.95")]  # of a mean over steps, at each step
Positive = Annotated[float, above_zero()]
Amount = Annotated[float, at_least(0)]
Epsilon = Annotated[float, above_zero_to_one()]
ScalingFactor = Annotated[float, at_least(1)]
Workers = Annotated[int, at_least(0, 1024, "processes")]
Scored = Annotated[int, at_least(0, 10**7, "sequences")]
Tokens = Annotated[int, at_least(0, 10**6, "tokens")]
Repeated = Annotated[int, at_least(0, 10**4, "steps, which are read before the first")]
Sequences = Annotated[int, at_least(1, 10**6, "sequences")]
Epochs = Annotated[int, at_least(1, 10**5, "passes")]
StepSequences = Annotated[int, at_least(1, 10**6, "sequences a step")]  # each is dealt out by itself
_DEVICES = Refusal("is no number of devices", "trainer.devices=auto for every GPU, or trainer=cpu")
Devices = Annotated[int, at_least(1, 4096, "processes on a machine", _DEVICES)]

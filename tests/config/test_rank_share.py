"""A micro-batch and the share of a process in a step."""

from dataclasses import replace

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.run_length import describe_micro_batch, fit_micro_batch


@pytest.mark.parametrize(
    ("whole", "micro", "processes", "expected"),
    [
        (16, 16, 1, 16), (16, 16, 2, 8), (16, 16, 4, 4), (16, 4, 4, 4), (24, 8, 2, 6), (16, 16, 3, 16),
        (512, 64, 16, 32), (16, "auto", 4, "auto"), (7, 7, 7, 1),
    ],
)  # fmt: skip
def test_it_divides_the_share(whole, micro, processes, expected):
    (config,) = preflight(["trainer=cpu"])
    config = replace(config, global_batch_size=whole, micro_batch_size=micro)
    lowered = fit_micro_batch(config, processes, ())
    assert lowered.micro_batch_size == expected
    assert len(list(describe_micro_batch(config, lowered))) == (expected != micro)


def test_what_was_typed_is_kept():
    (config,) = preflight(["trainer=cpu"])
    assert fit_micro_batch(config, 4, {"micro_batch_size"}) is config

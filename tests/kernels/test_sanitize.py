"""How the reports of compute-sanitizer are read; the kernels themselves need a GPU (`tests/gpu/sanitize.py`)."""

import pytest

from tests.gpu import sanitize

CLEAN = f"========= COMPUTE-SANITIZER\ncasts\n{sanitize.DONE}\n========= ERROR SUMMARY: 0 errors\n"
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at product_gelu+0x810
=========     and Read access at product_gelu+0x900 [64 hazards]
=========
========= Invalid __global__ read of size 16 bytes
=========     at layer_norm_forward+0x90
every kernel was called
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_reports_are_told_apart():
    assert sanitize.judge("memcheck", 0, CLEAN) == []
    race, invalid = sanitize.judge("racecheck", sanitize.FOUND, RACE)
    assert "Read access at product_gelu" in race
    assert invalid.startswith("Invalid __global__ read of size 16 bytes")


@pytest.mark.parametrize(
    ("status", "output", "word"),
    [
        (1, CLEAN.replace(sanitize.DONE, "CUDA error"), "did not come to their end"),
        (255, f"{sanitize.DONE}\n========= Error: Device not supported\n", "itself failed"),
        (sanitize.FOUND, CLEAN, "cannot read"),
    ],
)
def test_what_was_not_done_is_not_clean(status, output, word):
    assert word in sanitize.judge("memcheck", status, output)[-1]

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


def test_reports_are_told_apart_and_those_of_a_tool_are_suppressed():
    assert sanitize.judge("memcheck", 0, CLEAN, []) == ([], 0)
    listed = sanitize.read_suppressions("# why\n\nracecheck | product_gelu.*Read access | the engine is waited for\n")
    wrong, suppressed = sanitize.judge("racecheck", sanitize.FOUND, RACE, listed)
    assert ([report.splitlines()[0] for report in wrong], suppressed) == (
        ["Invalid __global__ read of size 16 bytes"], 1,
    )  # fmt: skip
    assert len(sanitize.judge("memcheck", sanitize.FOUND, RACE, listed)[0]) == 2
    assert all(s.why for s in sanitize.read_suppressions(sanitize.SUPPRESSIONS.read_text()))


@pytest.mark.parametrize(
    ("status", "output", "word"),
    [
        (1, CLEAN.replace(sanitize.DONE, "CUDA error"), "did not come to their end"),
        (255, f"{sanitize.DONE}\n========= Error: Device not supported\n", "itself failed"),
        (sanitize.FOUND, CLEAN, "cannot read"),
    ],
)
def test_what_was_not_done_is_not_clean(status, output, word):
    wrong, _ = sanitize.judge("memcheck", status, output, [])
    assert word in wrong[-1]

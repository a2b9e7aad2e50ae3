"""How the reports of compute-sanitizer are read; the kernels themselves need a GPU (`tests/gpu/sanitize.py`)."""

import pytest

from tests.gpu import sanitize

CLEAN = f"========= COMPUTE-SANITIZER\ncasts\n{sanitize.DONE}\n========= ERROR SUMMARY: 0 errors\n"
INVALID = """========= COMPUTE-SANITIZER
casts
========= Invalid __global__ write of size 4 bytes
=========     at cast+0x160
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Invalid __global__ read of size 16 bytes
=========     at layer_norm_forward+0x90
every kernel was called
========= ERROR SUMMARY: 2 errors
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at product_gelu+0x810
=========     and Read access at product_gelu+0x900 [64 hazards]
=========
every kernel was called
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_clean():
    assert sanitize.judge("memcheck", 0, CLEAN, []) == ([], 0)


def test_reports_are_told_apart():
    wrong, suppressed = sanitize.judge("memcheck", sanitize.FOUND, INVALID, [])
    assert [report.splitlines()[0] for report in wrong] == [
        "Invalid __global__ write of size 4 bytes",
        "Invalid __global__ read of size 16 bytes",
    ]
    assert "at cast+0x160" in wrong[0]
    assert suppressed == 0


def test_what_is_suppressed_is_of_its_tool_and_counted():
    listed = sanitize.read_suppressions("# why\n\nracecheck | product_gelu.*Read access | the engine is waited for\n")
    assert sanitize.judge("racecheck", sanitize.FOUND, RACE, listed) == ([], 1)
    assert len(sanitize.judge("memcheck", sanitize.FOUND, RACE, listed)[0]) == 1


@pytest.mark.parametrize(
    ("status", "output", "word"),
    [
        (1, CLEAN.replace(sanitize.DONE, "CUDA error"), "did not come to their end"),
        (-9, "========= COMPUTE-SANITIZER\ncasts\n", "did not come to their end"),
        (255, f"{sanitize.DONE}\n========= Error: Device not supported\n", "itself failed"),
        (0, f"{sanitize.DONE}\n", "itself failed"),
        (sanitize.FOUND, CLEAN, "cannot read"),
    ],
)
def test_what_was_not_done_is_not_clean(status, output, word):
    wrong, _ = sanitize.judge("memcheck", status, output, [])
    assert word in wrong[-1]


@pytest.mark.parametrize("line", ["racecheck | x", "racecheck | x | ", "gpucheck | x | why"])
def test_a_suppression_says_why(line):
    with pytest.raises(ValueError, match=r"racecheck|gpucheck|unpack"):
        sanitize.read_suppressions(line)


def test_the_file_of_suppressions_can_be_read():
    assert all(s.why for s in sanitize.read_suppressions(sanitize.SUPPRESSIONS.read_text()))


def test_without_the_sanitizer_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "find", lambda: None)
    assert sanitize.main() == 2
    assert "COMPUTE_SANITIZER=PATH" in capsys.readouterr().out


def test_it_is_found_where_it_is_said_to_be(monkeypatch, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("COMPUTE_SANITIZER", str(tool))
    assert sanitize.find() == str(tool)
    monkeypatch.delenv("COMPUTE_SANITIZER")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.find() == str(tool)

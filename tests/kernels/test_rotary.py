"""Runs `interpreted_rotary.py` in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.whole
def test_in_tritons_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("interpreted_rotary.py"))],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout

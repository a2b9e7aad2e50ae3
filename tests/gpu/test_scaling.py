"""What of the GPUs' speed is left in a run of all of them. Nothing else may run on the machine meanwhile."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.common import hopper

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.fp8, hopper, pytest.mark.skipif(GPUS < 2, reason="fewer than two GPUs")]
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/several_gpus.py"
# Only the vocabulary's size counts for the speed, not which ids a text has.
WORDS = ["data=stdlib", "data.tokenizer=bytes", "model.vocab_size=50304"]


@pytest.mark.parametrize(
    ("model", "sequences", "share"), [("gpt2", 64, 0.93), ("gpt2", 16, 0.85), ("gpt2_xl", 16, 0.90)]
)
def test_gpus_keep_their_speed_together(tmp_path, model, sequences, share):
    """With `sequences` a step on each. docs/several-gpus.md has 95 to 98, 88 to 89, and 91 to 92 %."""
    batch = [f"micro_batch_size={sequences}", f"global_batch_size={sequences}"]
    command = [sys.executable, str(SCRIPT), str(tmp_path / "runs"), "--gpus", *map(str, range(GPUS)), "--"]
    done = subprocess.run([*command, f"model={model}", *WORDS, *batch], text=True, capture_output=True, timeout=400)
    found = re.search(r"^together: .*, (\S+)%; first row", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    print(done.stdout)
    assert float(found[1]) / 100 > share

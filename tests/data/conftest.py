"""A corpus that many tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.corpora import write_jsonl


@pytest.fixture
def many_units(tmp_path: Path) -> Path:
    """70 files of 5 documents each, every document different: enough units for 4 lanes of a batch of 8."""
    folder = tmp_path / "many"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(70):
        write_jsonl(folder / f"{i:02d}.jsonl", [f"<{i}.{j}>" + "x" * int(rng.integers(0, 60)) for j in range(5)])
    return folder / "*.jsonl"

"""Ranks gather their lanes: one goes on where two have stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver
from tests.data.corpora import files_config, items, module

ROOT = Path(__file__).parents[2]


RANK = """
import json, sys
from torch import distributed
from tests.data.corpora import files_config, items, module
rank, world, folder, state = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
made = module(files_config(f"{folder}/*.jsonl", val_fraction=0.3, val_sequences=7))
if state: made.load_state_dict(state)
ids = items(made, 5)
val = [batch["ids"].tolist() for batch in made.val_dataloader()]
print(json.dumps({"ids": [i.tolist() for i in ids], "val": val, "state": made.state_dict()}))
distributed.destroy_process_group()
"""


def ranks(folder: Path, world: int, state: Any) -> list[dict[str, Any]]:
    """What each of `world` processes read in five steps from `state` on."""
    (folder / "meet").unlink(missing_ok=True)
    processes = [
        forkserver.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world), str(folder), json.dumps(state)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for rank in range(world)
    ]  # fmt: skip
    return [json.loads(process.communicate(timeout=120)[0]) for process in processes]


@pytest.mark.whole
def test_ranks_gather_their_lanes(many_units: Path) -> None:
    folder = many_units.parent
    config = files_config(f"{folder}/*.jsonl", val_fraction=0.3, val_sequences=7)
    alone = module(config)
    whole = [batch.tolist() for batch in items(alone, 10)]
    sequences = [row for batch in alone.val_dataloader() for row in batch["ids"].tolist()][:7]
    first = ranks(folder, 2, None)
    assert first[0]["state"] == first[1]["state"]
    assert [[a, b] for a, b in zip(first[0]["ids"], first[1]["ids"], strict=True)] == [
        [batch[0::2], batch[1::2]] for batch in whole[:5]
    ]
    assert [[len(batch) for batch in rank["val"]] for rank in first] == [[4], [4]]
    assert first[0]["val"][0] == sequences[0::2]
    assert first[1]["val"][0] == [*sequences[1::2], [-1] * 17]
    continued = module(config)  # one rank goes on where two stopped
    continued.load_state_dict(first[0]["state"])
    assert [batch.tolist() for batch in items(continued, 5)] == whole[5:]
    assert continued.state_dict() == alone.state_dict()

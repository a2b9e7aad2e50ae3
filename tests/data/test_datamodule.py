"""The data module under Lightning: exact resume through its checkpoints, and ranks that agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from gpt2_fp8.data.datamodule import TokenDataModule
from tests import forkserver
from tests.data.corpora import files_config, items, module

ROOT = Path(__file__).parents[2]


class Recorder(LightningModule):
    """Keeps what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[np.ndarray] = []
        self.validated: list[np.ndarray] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        assert batch_idx == batch["cursor"]["step"] - 1
        self.optimizers().step()  # type: ignore[union-attr]
        self.seen.append(batch["ids"].numpy().copy())
        self.trainer.datamodule.advance(batch["cursor"])  # type: ignore[attr-defined]

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated.append(batch["ids"].numpy().copy())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(config: Any, folder: Path, stop: int, ckpt: Path | None = None) -> tuple[Recorder, Path]:
    """Train to step `stop` of 12, and the checkpoint that it left."""
    made = TokenDataModule(config, n_positions=16, global_batch_size=8, micro_batch_size=4, max_steps=12)
    model = Recorder()
    trainer = Trainer(
        accelerator="cpu", max_steps=stop, val_check_interval=5, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=made, ckpt_path=ckpt)
    saved = folder / f"{stop}.ckpt"
    trainer.save_checkpoint(saved)
    return model, saved


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_exactly(many_units: Path, tmp_path: Path) -> None:
    config = files_config(many_units, val_fraction=0.3, val_sequences=6)
    whole, _ = fit(config, tmp_path, 12)
    assert len(whole.seen) == 12
    assert len(whole.validated) == 4  # two validations of two items
    plain = items(module(config, max_steps=12))
    assert all(np.array_equal(a, b) for a, b in zip(whole.seen, plain, strict=True))
    first, saved = fit(config, tmp_path, 4)
    second, saved = fit(config, tmp_path, 7, saved)
    third, _ = fit(config, tmp_path, 12, saved)
    legs = [*first.seen, *second.seen, *third.seen]
    assert all(np.array_equal(a, b) for a, b in zip(legs, plain, strict=True))


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

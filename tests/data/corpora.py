"""Small corpora, made in each test's own folder, and the means to read an order back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_fp8.config.data_schema import FilesData
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.data.lane import Batches, Lane, lane_start


def files_config(train: Any, **changes: Any) -> FilesData:
    """A `files` configuration for the paths or globs `train`, in bytes, without validation."""
    patterns = [str(p) for p in (train if isinstance(train, list) else [train])]
    values: dict[str, Any] = {
        "name": "files", "kind": "files", "train_files": patterns, "val_files": [], "val_fraction": 0.0,
        "text_column": "text", "tokenizer": "bytes", "num_workers": 0, "seed": 7, "val_sequences": 0, "cache_dir": None,
    }  # fmt: skip
    return FilesData(**{**values, **changes})


def module(config: Any, **changes: Any) -> TokenDataModule:
    """A data module that is set up: 8 sequences of 16 + 1 tokens a step."""
    values: dict[str, Any] = {
        "n_positions": 16, "global_batch_size": 8, "micro_batch_size": 4, "max_steps": 20
    }  # fmt: skip
    made = TokenDataModule(config, **{**values, **changes})
    made.setup()
    return made


def items(made: TokenDataModule, n: int | None = None, *, advance: bool = True) -> list[np.ndarray]:
    """The ids of the next `n` items (all that are left), each of them "trained on"."""
    out = []
    for item in made.train_dataloader():
        out.append(item["ids"].numpy())
        if advance:
            made.advance(item["cursor"])
        if len(out) == n:
            break
    return out


def rank_batches(made: TokenDataModule, rank: int, world: int, lanes: dict[str, Any] | None = None) -> Batches:
    """What rank `rank` of `world` would read of the data of `made`, from the start or from saved lanes."""
    (stream,) = made.text.streams
    order = stream.order
    mine = {
        i: Lane(
            i, order, made.text.corpus.train, made.text.pool, made.n_positions, lanes[str(i)] if lanes else lane_start()
        )
        for i in made.text.deal.of_rank(rank, world)
    }  # fmt: skip
    return Batches(mine, made.text.deal, made.n_positions, rank, world)


def write_jsonl(path: Path, texts: list[Any]) -> Path:
    """A line {"text": ...} for each of `texts`."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path

"""Small corpora, made in each test's own folder, and the means to read an order back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2_fp8.config.data_schema import FilesData, MixtureData
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.data.lane import Batches
from tests.data.token_files_made import ids_config, nano


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpt2_fp8.data.token_stream.rank_and_world", lambda: (rank, world))
        patch.setattr(made.text.progress, "lanes", lanes)
        return made.text.batches(from_start=lanes is None)[1]


def write_jsonl(path: Path, texts: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


# ---- mixtures of small corpora whose bytes tell which source a sequence is of ----------------------------------------


def mixture(sources: dict[str, Any], weights: dict[str, float] | None = None, seed: int = 7) -> MixtureData:
    return MixtureData(name="mixture", kind="mixture", seed=seed, weights=weights, sources=sources)


def letters(folder: Path, letter: str, files: int, **changes: Any) -> Any:
    """A source of `files` files of five documents, each of one letter and its own number of them."""
    folder = folder / letter
    folder.mkdir(exist_ok=True)
    for i in range(files):
        write_jsonl(folder / f"{i:02d}.jsonl", [letter * (3 + 7 * i + j) for j in range(5)])
    return files_config(folder / "*.jsonl", **changes)


def three(tmp_path: Path, workers: int = 0, **changes: Any) -> MixtureData:
    """`a` of 40 units and two lanes, `b` of one unit, and `c` of token ids, in unequal shares."""
    rng = np.random.default_rng(3)
    path = nano(tmp_path / "c.bin", np.where(rng.random(900) < 0.01, 256, ord("c")))
    sources = {"a": letters(tmp_path, "a", 40, num_workers=workers), "b": letters(tmp_path, "b", 1)}
    sources["c"] = ids_config(path, seed=1)
    return mixture(sources, {"a": 0.5, "b": 0.3, "c": 0.2}, **changes)


def sources_of(ids: np.ndarray) -> np.ndarray:
    assert all(len(set(row[row < 256].tolist())) == 1 for row in ids), "a sequence is of one source"
    return np.array([chr(row[row < 256][0]) for row in ids])

"""Mixtures of small corpora whose bytes tell which source a sequence is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gpt2_fp8.config.data_schema import MixtureData
from gpt2_fp8.data.datamodule import TokenDataModule
from tests.data.corpora import files_config, write_jsonl
from tests.data.token_files_made import ids_config, nano


def mixture(sources: dict[str, Any], weights: dict[str, float] | None = None, seed: int = 7) -> MixtureData:
    """A mixture of these configurations."""
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
    sources = {
        "a": letters(tmp_path, "a", 40, num_workers=workers),
        "b": letters(tmp_path, "b", 1),
        "c": ids_config(path, seed=1),
    }
    return mixture(sources, {"a": 0.5, "b": 0.3, "c": 0.2}, **changes)


def sources_of(ids: np.ndarray) -> np.ndarray:
    """Which letter each sequence is of."""
    assert all(len(set(row[row < 256].tolist())) == 1 for row in ids), "a sequence is of one source"
    return np.array([chr(row[row < 256][0]) for row in ids])


def shares(made: TokenDataModule, steps: list[np.ndarray]) -> dict[str, float]:
    """The part of the sequences that each letter has."""
    found = sources_of(np.concatenate(steps))
    return {letter: float((found == letter).mean()) for letter in sorted(set(found))}

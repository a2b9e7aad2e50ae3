"""Files of token ids as nanoGPT, llm.c and modded-nanogpt write them, and a configuration that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gpt2_fp8.config.data_schema import TokenFilesData

LLM_C, LLAMA_3 = (20240520, 1), (20240801, 7)


def some_ids(n: int, seed: int = 0) -> np.ndarray:
    """`n` ids of the `bytes` tokenizer, in documents of some 50."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(n) < 0.02, 256, rng.integers(0, 256, n))


def nano(path: Path, ids: np.ndarray, dtype: str = "<u2") -> Path:
    """As nanoGPT's `prepare.py`: nothing but ids."""
    path.write_bytes(ids.astype(dtype).tobytes())
    return path


def llm_c(path: Path, ids: np.ndarray, kind: tuple[int, int] = LLM_C, count: int | None = None) -> Path:
    """As llm.c's `write_datafile`: 256 int32, then the ids."""
    header = np.zeros(256, "<i4")
    header[:3] = *kind, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.astype("<u4" if kind == LLAMA_3 else "<u2").tobytes())
    return path


def ids_config(train: Any, **changes: Any) -> TokenFilesData:
    """A `token_files` configuration for the paths or globs `train`, in bytes, without validation."""
    patterns = [str(p) for p in (train if isinstance(train, list) else [train])]
    values: dict[str, Any] = {
        "name": "token_files", "kind": "token_files", "train_files": patterns, "val_files": [], "headerless": "uint16",
        "tokenizer": "bytes", "num_workers": 0, "seed": 7, "val_sequences": 0,
    }  # fmt: skip
    return TokenFilesData(**{**values, **changes})

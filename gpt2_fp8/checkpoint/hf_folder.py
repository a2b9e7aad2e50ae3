"""Hugging Face's folders: safetensors in one file or in several, and `config.json`. Pickles are never opened."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.checkpoint.files import save_tensors
from gpt2_fp8.checkpoint.manifest import CheckpointError
from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.hf_config import CONFIG, INDEX, WEIGHTS

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # each value of them is one of float32
_REMEDY = "give a whole folder, as save_pretrained of transformers writes it"


class Tensors:
    """The tensors of a folder. Opening reads the files' headers; `load` reads numbers.

    Attributes: `shapes`, by the names in the files.

    Raises CheckpointError for a folder that cannot be read.
    """

    def __init__(self, path: Path, stack: ExitStack):
        self.path = path
        files = {name: stack.enter_context(safe_open(path / name, framework="pt")) for name in _files(path)}
        self._files = {key: file for file in files.values() for key in file.keys()}  # noqa: SIM118 - no dict
        self.shapes = {key: tuple(file.get_slice(key).get_shape()) for key, file in self._files.items()}

    def load(self, key: str) -> Tensor:
        """Return a tensor, on the CPU. Raises CheckpointError for one that is not float32, bfloat16 or float16."""
        if (dtype := self._files[key].get_slice(key).get_dtype()) not in DTYPES:
            raise weights_error(self.path, [f"{key} is of {dtype}, and not of {', '.join(DTYPES)}"])
        tensor: Tensor = self._files[key].get_tensor(key)
        return tensor


@contextmanager
def open_weights(path: Path) -> Iterator[Tensors]:
    """Open a folder's weights. Raises CheckpointError, also for what cannot be read of them while they are open."""
    with ExitStack() as stack:
        try:
            yield Tensors(path, stack)
        except (SafetensorError, OSError) as error:
            raise weights_error(path, [f"they cannot be read ({error})"]) from error


def weights_error(path: Path, reasons: list[str]) -> CheckpointError:
    """Return the error that says why a folder's weights are of no use."""
    return CheckpointError([Problem(f"the weights of init_from={path}: {reason}", _REMEDY) for reason in reasons])


def write(path: Path, weights: dict[str, Tensor], config: dict[str, Any], others: Mapping[str, bytes]) -> None:
    """Write a folder that is not there yet, or is empty. It appears whole or not at all. Raises OSError.

    `others`: what other small files are to be in it, by their names.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_tensors(temporary / WEIGHTS, weights)
        durable.write_json(temporary / CONFIG, config)
        for name, content in others.items():
            (temporary / name).write_bytes(content)
            durable.fsync(temporary / name)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    durable.fsync(path.parent)


def _files(path: Path) -> list[str]:
    """Return the names of a folder's files of weights."""
    if (path / WEIGHTS).is_file():
        return [WEIGHTS]
    try:
        names = sorted(set(disk.read_json(path / INDEX)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise weights_error(path, [f"{INDEX} cannot be read ({error})"]) from None
    if odd := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise weights_error(path, [f"{INDEX} names {odd[0]!a:.100}, which is no file of safetensors in the folder"])
    return names

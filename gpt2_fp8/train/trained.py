"""A trained model from its folder, for the programs that use it: the checkpoint, its configuration, its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.checkpoint import files, find
from gpt2_fp8.checkpoint.manifest import CheckpointError, unreadable
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.paths import EXAMPLES, Which, is_run
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.train import saved_config


class Trained(NamedTuple):
    """What a checkpoint holds of a model.

    Attributes:
        path: its folder.
        config: the run's.
        weights: float32, by our names.
        step: what a training step begins with beside them, such as FP8 scales.
        parts: what else was asked for, and `saved_config.KEY`. A stranger's may hold anything.
    """

    path: Path
    config: RunConfig
    weights: Mapping[str, Tensor]
    step: Mapping[str, Any]
    parts: Mapping[str, Any]


def load(ckpt_path: str, which: Which) -> Trained:
    """Return the model that `ckpt_path` and `checkpoint` of a program's command line mean, checked.

    Raises UserError, with remedies for that command line.
    """
    try:
        return read(find_checkpoint(Path(ckpt_path).expanduser(), which))
    except CheckpointError as error:  # its own remedies are for a run, or for Python
        other = "checkpoint=last, or " if which == "best" else ""
        remedy = f"name another one: {other}{EXAMPLES}"
        raise CheckpointError([Problem(problem.cause, remedy) for problem in error.problems]) from None


def find_checkpoint(source: Path, which: Which = "last") -> Path:
    """Return the checkpoint that `source` means: it is one, or a run's folder with its last or its best.

    The last is the newest whole one. Raises UserError if there is none, or the best is damaged.
    """
    if not is_run(source):
        return source
    found = find.resolve(which, source / "checkpoints")
    if found is None:
        raise UserError.of(f"{source} has no checkpoint yet", "name a run that has saved one")
    return found


def read(path: Path, *parts: str, map_location: torch.device | str = "cpu", config: RunConfig | None = None) -> Trained:
    """Read a checkpoint's folder, and these parts of it too, where it has them.

    `config` is for a checkpoint that does not hold its own. Raises CheckpointError for one that is damaged, does not
    hold its configuration, or whose weights are of another model.
    """
    checkpoint = files.read(path, map_location, ("state_dict", "training_step", saved_config.KEY, *parts))
    config = config or saved_config.from_checkpoint(checkpoint, path)
    try:
        block_spec(config.model)
    except ValueError as error:
        raise unreadable(path, f"its model does not fit together: {error}") from None
    saved_config.check_size(config, checkpoint["state_dict"], path)
    rest = {key: checkpoint[key] for key in (saved_config.KEY, *parts) if key in checkpoint}
    return Trained(path, config, checkpoint["state_dict"], checkpoint.get("training_step", {}), rest)

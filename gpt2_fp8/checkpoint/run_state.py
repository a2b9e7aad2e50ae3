"""What a checkpoint has to hold for a run to continue from it: which keys, of which types.

Digests show that a checkpoint is what somebody wrote, not that it is a run's. Lightning takes over what it finds
without a look, so that a wrong type would come to light in the midst of training, as an error of ours. The table is
asked where a run is resumed, without reading a number; what it cannot tell, whoever restores it finds out, under
`restoring`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.checkpoint.errors import unfit
from gpt2_fp8.checkpoint.load import read_structure
from gpt2_fp8.config.errors import RunError

# A form is a type; a tuple of forms, any of which will do; `COUNT`; `Maybe` or `Some`; [form], a list of any length;
# or {key: form}, a dict with these keys at least, where the key ... stands for all others.
Form = Any
COUNT = "a number of things"  # an int from 0 on
NUMBER = (float, int)


class Maybe(NamedTuple):
    """A key that may be missing."""

    form: Form


class Some(NamedTuple):
    """A list of one entry at least."""

    form: Form


_TRACKED = {"ready": COUNT, "completed": COUNT, "started": Maybe(COUNT), "processed": Maybe(COUNT)}
_PROGRESS = {"total": _TRACKED, "current": _TRACKED}
_ALL_TRACKED = dict.fromkeys(("ready", "completed", "started", "processed"), COUNT)
_BATCHES = {"total": _ALL_TRACKED, "current": _ALL_TRACKED, "is_last_batch": bool}
_LANE = {"epoch": COUNT, "position": COUNT, "offset": COUNT, "block": COUNT, "documents": {...: COUNT}}

RUN: Form = {
    "global_step": COUNT,
    "epoch": COUNT,
    "pytorch-lightning_version": str,
    "state_dict": {...: Tensor},
    "optimizer_states": Some(
        {
            "state": {...: {"step": Tensor, "exp_avg": Tensor, "exp_avg_sq": Tensor}},
            "param_groups": Some({"params": [COUNT]}),
        }
    ),
    "lr_schedulers": Some({"last_epoch": COUNT}),
    "loops": {
        "fit_loop": {
            "epoch_progress": _PROGRESS,
            "epoch_loop.state_dict": {"_batches_that_stepped": COUNT},
            "epoch_loop.batch_progress": _BATCHES,
            "epoch_loop.scheduler_progress": _PROGRESS,
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {"step": _PROGRESS, "zero_grad": _PROGRESS}
            },
            "epoch_loop.manual_optimization.optim_step_progress": _PROGRESS,
            "epoch_loop.val_loop.batch_progress": _BATCHES,
        }
    },
    "callbacks": {
        "Tiers": Maybe(
            {
                "best": (NoneType, {"step": COUNT, "val_loss": (NoneType, *NUMBER)}),
                "validated_step": (NoneType, COUNT),
                "validation_due": bool,
            }
        ),
        "Fallback": Maybe(
            {
                "events": [{"step": COUNT, "what": str, "reason": str}],
                **dict.fromkeys(("reruns", "skipped", "rollbacks"), COUNT),
                "in_a_row": dict.fromkeys(("skips", "high", "high_since"), COUNT),
                "statistics": {"mean": NUMBER, "variance": NUMBER, "count": COUNT},
            }
        ),
    },
    "rng": Some(
        {
            "python": tuple,
            "numpy": {"name": str, "keys": Tensor, "position": COUNT, "has_gauss": COUNT, "gauss": NUMBER},
            "torch": Tensor,
            "cuda": Maybe(Tensor),
        }
    ),
    "TokenDataModule": {
        "fingerprint": {...: (str, int)},
        "step": COUNT,
        "lanes": {...: _LANE},
        "digests": Maybe({...: str}),
    },
    "FP8Precision": Maybe({"scaling": Maybe(str), "sequences": Maybe(COUNT), ...: Tensor}),
    # of version 2
    "model": Maybe(dict),
    "micro_batch_size": Maybe({"asked": COUNT, "fits": COUNT}),
    "precision": Maybe({"fell_back": Maybe(bool)}),
}

_SHOWN = 5  # problems; a table of them helps nobody


def check(path: Path | str) -> None:
    """Raise CheckpointError unless `path` is a whole checkpoint that a run can continue from, as far as types tell."""
    path = Path(path)
    problems = list(_problems(read_structure(path), RUN, ""))
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise unfit(path, "; ".join(problems[:_SHOWN]) + more)


@contextmanager
def restoring(path: Path | str | None) -> Iterator[None]:
    """While something of the checkpoint `path` is put in its place: what goes wrong is the checkpoint's fault.

    Raises CheckpointError for any error but those of a known kind, and those of memory, of a device, of the disk, or
    of the connection between ranks, which come out as they are. `path` is None where there is nothing to restore.
    """
    try:
        yield
    except (
        RunError,
        MemoryError,
        OSError,
        torch.OutOfMemoryError,
        torch.AcceleratorError,
        torch.distributed.DistError,
    ):
        raise
    except Exception as error:
        if path is None:
            raise
        raise unfit(Path(path), f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _problems(value: Any, form: Form, name: str) -> Iterator[str]:
    """In what `value`, which is called `name`, is not of `form`."""
    if isinstance(form, dict):
        yield from _problems_of_dict(value, form, name)
    elif isinstance(form, (list, Some)):
        if not isinstance(value, list) or (isinstance(form, Some) and not value):
            yield f"{name} is {_kind(value)}, not a list" + (" of one entry at least" if isinstance(form, Some) else "")
            return
        for index, entry in enumerate(value):
            yield from _problems(entry, form[0], f"{name}.{index}")
    elif isinstance(form, tuple):
        found = [list(_problems(value, one, name)) for one in form]
        if all(found):
            yield found[-1][0]  # the last form is the fullest
    elif form == COUNT:
        if type(value) is not int or value < 0:
            yield f"{name} is {_kind(value)}, not an int from 0 on"
    elif not isinstance(value, form) or (form is int and type(value) is bool):
        yield f"{name} is {_kind(value)}, not {form.__name__}"


def _problems_of_dict(value: Any, form: dict[Any, Form], name: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{name or 'the state'} is {_kind(value)}, not a dict"
        return
    for key, inner in form.items():
        if key is ...:
            continue
        if key in value:
            inner = inner.form if isinstance(inner, Maybe) else inner
            yield from _problems(value[key], inner, f"{name}.{key}".lstrip("."))
        elif not isinstance(inner, Maybe):
            yield f"{name}.{key} is missing".lstrip(".")
    if ... in form:
        for key in value.keys() - form.keys():
            yield from _problems(value[key], form[...], f"{name}.{key}".lstrip("."))


def _kind(value: Any) -> str:
    """What a value is, in a word or two: it may be of any size."""
    if value is None or (type(value) in (bool, int) and abs(value) < 10**9):
        return str(value)
    if isinstance(value, (list, dict)) and not value:
        return f"an empty {type(value).__name__}"
    return f"of type {type(value).__name__}"

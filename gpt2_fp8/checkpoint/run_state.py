"""What a checkpoint has to hold for a run to continue from it: which keys, of which types, within which bounds.

Digests show that a checkpoint is what somebody wrote, not that it is a run's. Lightning does not check what it
restores. A wrong value would appear later, as an error of ours or as a run that never ends. Three checks come first:
keys and types, without reading a tensor; numbers that must agree; weights that must be finite. `restoring` explains
what they miss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.checkpoint.agreement import disagreements
from gpt2_fp8.checkpoint.errors import unfit
from gpt2_fp8.checkpoint.finite import check_weights
from gpt2_fp8.checkpoint.forms import Exactly, Form, Line, Maybe, Numbers, Real, Row, Some, Whole, Word, problems
from gpt2_fp8.checkpoint.load import read_structure
from gpt2_fp8.checkpoint.names import MOST_STEPS
from gpt2_fp8.config.errors import RunError


class _Version(NamedTuple):
    """Lightning's, whose own reader takes any length."""

    def why_not(self, value: Any) -> str | None:
        if not isinstance(value, str):
            return "str"
        return None if re.fullmatch(r"2\.[0-9]{1,4}\.[0-9]{1,4}[0-9a-z.+]{0,30}", value) else "a version from 2.0 on"


COUNT = Whole()
STEP = Whole(1, MOST_STEPS - 1)
LOSS = Real(-1.0, 3.5e38)  # of float32; rounding leads it below 0
_EVENTS = 10_000  # `DivergencePolicy` keeps a tenth

_TRACKED = Exactly({"ready": COUNT, "completed": COUNT, "started": Maybe(COUNT), "processed": Maybe(COUNT)})
_PROGRESS = {"total": _TRACKED, "current": _TRACKED}
_ALL_TRACKED = Exactly(dict.fromkeys(("ready", "completed", "started", "processed"), COUNT))
_BATCHES = {"total": _ALL_TRACKED, "current": _ALL_TRACKED, "is_last_batch": bool}
_LANE = {"epoch": COUNT, "position": COUNT, "offset": COUNT, "block": COUNT, "documents": {...: COUNT}}
_STEP, _FLOATS, _HALVES, _CODES = (
    Numbers(torch.float32, ()), Numbers(torch.float32), Numbers(torch.bfloat16), Numbers(torch.uint8),
)  # fmt: skip
_OF_A_PARAMETER = (  # what each optimizer keeps; which one it must be, and of which shape: `engine.saved_moments`
    Exactly({"momentum_buffer": _FLOATS}),
    Exactly(
        {"step": _STEP, "exp_avg": _CODES, "exp_avg_sq": _CODES, "exp_avg_scale": _FLOATS, "exp_avg_sq_scale": _FLOATS}
    ),
    Exactly({"step": _STEP, "exp_avg": _HALVES, "exp_avg_sq": _HALVES}),
    {"step": _STEP, "exp_avg": _FLOATS, "exp_avg_sq": _FLOATS},
)
_BYTES = Numbers(torch.uint8)
_WORD = Whole(0, 2**32 - 1)
_PYTHON = Row((Whole(3, 3), Row((_WORD,) * 624 + (Whole(0, 624),)), (NoneType, Real(-1e3, 1e3))))

RUN: Form = {
    "global_step": STEP,
    "epoch": COUNT,
    "pytorch-lightning_version": _Version(),
    "state_dict": {...: Tensor},
    "optimizer_states": Some(
        {
            "state": {...: _OF_A_PARAMETER},
            "param_groups": Some({"params": [COUNT]}),
        },
        most=1,
    ),
    "lr_schedulers": Some({"last_epoch": COUNT}, most=1),
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
        "Checkpointing": Maybe(
            {
                "best": (NoneType, {"step": STEP, "val_loss": (NoneType, LOSS)}),
                "validated_step": (NoneType, COUNT),
                "validation_due": bool,
            }
        ),
        "DivergenceGuard": Maybe(
            {
                "events": Some(Exactly({"step": COUNT, "what": Line(20), "reason": Line()}), 0, _EVENTS),
                **dict.fromkeys(("reruns", "skipped"), COUNT),
                "rollbacks": Whole(0, 1),  # the second ends a run
                "in_a_row": dict.fromkeys(("skips", "high", "high_since"), COUNT),
                "statistics": {"mean": LOSS, "variance": Real(0.0, 1e80), "count": COUNT},
            }
        ),
        "TimeLimit": Maybe({"seconds": Real(0.0, 1e12)}),
    },
    "rng": Some(
        {
            "python": _PYTHON,
            "numpy": {
                "name": Word(("MT19937",)),
                "keys": Numbers(torch.uint8, (4 * 624,)),
                "position": Whole(0, 624),
                "has_gauss": Whole(0, 1),
                "gauss": Real(-1e3, 1e3),
            },
            "torch": _BYTES,
            "cuda": Maybe(_BYTES),
        }
    ),
    "TokenDataModule": {
        "fingerprint": {...: (Line(), Whole(0, 2**64))},
        "step": COUNT,
        "lanes": {...: _LANE},
        "validation": Maybe((NoneType, Line(64))),
        "digests": Maybe({"train": str, ...: str}),
    },
    # the configuration, which `train.saved_config` reads strictly
    "hyper_parameters": Maybe({...: (NoneType, bool, str, Real(-1e300, 1e300), list, dict)}),
    # of version 2
    "model": Maybe({...: (NoneType, bool, Line(), Whole(), Real(-1e9, 1e9))}),
    "optimizer": Maybe(Word(("adamw", "adamw_bf16", "adamw8bit", "muon"))),
    "training_step": Maybe(
        {
            "micro_batch_size": Maybe({"asked": Whole(1), "fits": Whole(1), "fits_in_bf16": Maybe(Whole(1))}),
            "scaling": Maybe({"settings": Maybe(Line(4000)), "sequences": Maybe(Whole(1)), ...: Tensor}),
            "separator_begins": Maybe(bool),
            "last_in_bf16": Maybe(COUNT),
        }
    ),
    "precision": Maybe(
        {
            "asked": Maybe(Line(40)),
            "ran": Maybe(Word(("fp32", "bf16", "fp8_hybrid", "fp8_e4m3", "fp8_e5m2"))),
            "recipe": Maybe((NoneType, Word(("delayed", "current", "rowwise", "block", "mxfp8")))),
            "reason": Maybe((NoneType, str)),
            "fell_back": Maybe(bool),
        }
    ),
}

_SHOWN = 5  # problems; a table of them helps nobody


def check(path: Path | str) -> None:
    """Raise CheckpointError unless `path` is a whole checkpoint that a run can continue from.

    Checked are its form, the numbers beside its tensors, and that its weights are finite.
    """
    path = Path(path)
    check_state(path, read_structure(path))
    check_weights(path)


def check_state(path: Path, state: dict[str, Any]) -> None:
    """Raise CheckpointError unless `state`, which was read from `path`, is one that a run can continue from."""
    found = list(problems(state, RUN)) or list(disagreements(state))
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise unfit(path, "; ".join(found[:_SHOWN]) + more)


@contextmanager
def restoring(path: Path | str | None) -> Iterator[None]:
    """Enter a context that restores something of the checkpoint `path`: an error in it is the checkpoint's fault.

    Raises CheckpointError for it. Known errors come out as they are, and so do those of memory, a device, the disk or
    the connection between ranks. `path` is None if there is nothing to restore.
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

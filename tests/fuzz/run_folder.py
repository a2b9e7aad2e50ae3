"""A run's folder as the program leaves it, to be damaged: three steps, a checkpoint of each, validated."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.fuzz.place import SMALL, Place
from tests.fuzz.program import Outcome, Program

STEPS = 3
LONGER = [
    *SMALL, "run_name=run", f"trainer.max_steps={STEPS}", "trainer.val_check_interval=1",
    "callbacks.checkpoint_every_n_steps=1", "callbacks.keep_checkpoints=3",
]  # fmt: skip
ON = [*LONGER, f"trainer.max_steps={STEPS + 1}"]
# a killed writer leaves a checkpoint that it moves aside as `.step-00000003.old`, which is one
_CONTINUES = re.compile(r"continues  .*/(?:step-|\.step-(?=\d+\.old ))(\d+)(?:\.old)? \(step (\d+)\)")


@cache
def made() -> tempfile.TemporaryDirectory[str]:
    """A folder in which the run was made, once a process."""
    folder = tempfile.TemporaryDirectory(prefix="fuzz-run-")
    place = Place(Path(folder.name, "place"), Program())
    place.clear()
    outcome = place.run(*LONGER)
    place.expect(outcome.code == 0, outcome.stderr)
    return folder


def lay(place: Place) -> Path:
    """Put a copy of the run where the next command finds it; returns its folder."""
    return shutil.copytree(Path(made().name, "place/here/outputs/run"), place.here / "outputs/run")


def weights_of(checkpoint: Path) -> dict[str, str]:
    """The digest of each tensor in a checkpoint's file, by its name."""
    tensors = load_file(checkpoint / "model.safetensors")
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in tensors.items()}


@cache
def true_weights() -> dict[int, dict[str, str]]:
    """Those of the run as it was made, by step."""
    folder = Path(made().name, "place/here/outputs/run/checkpoints")
    return {step: weights_of(folder / f"step-{step:08d}") for step in range(1, STEPS + 1)}


@cache
def true_losses() -> dict[int, float]:
    """Its validation losses, by step."""
    folder = Path(made().name, "place/here/outputs/run/checkpoints")
    return {
        step: json.loads((folder / f"step-{step:08d}/validation.json").read_text())["val_loss"]
        for step in range(1, STEPS + 1)
    }


def continued(outcome: Outcome, place: Place, true: bool = True) -> int | None:
    """The step that a run has continued from, None where it has not begun. Raises `Broken` where it is another than
    it says, or (where the checkpoints are `true`) its weights are not that step's."""
    said = _CONTINUES.search(outcome.stdout)
    if not outcome.noted("step"):
        return None
    place.expect(said, "a run that was to be continued has begun anew")
    assert said is not None
    named, step = map(int, said.groups())
    place.expect(named == step == outcome.noted("step")[0], f"says {said[0]}, and begins at {outcome.noted('step')[0]}")
    if true:
        place.expect(
            same(outcome.noted("weights")[0], true_weights()[step]), f"other weights than those of step {step}"
        )
    return step


def same(found: dict[str, str], saved: dict[str, str]) -> bool:
    """Whether a module has every weight that was saved."""
    return bool(saved) and all(found.get(name) == digest for name, digest in saved.items())


def plain(value: Any) -> Any:
    """JSON's own values, of whatever it is."""
    return json.loads(json.dumps(value))

"""`python -m tests.fuzz.noted NOTES ARGV...`: the program, with notes of what it trains on.

Two things are added to `python -m gpt2_fp8.run ARGV`. A run too large for this test is not trained (`_affordable`). And
the first step notes what the run begins with: its step, the weights' digests, its settings; each step notes its tokens.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


def main(notes: str, *argv: str) -> int:
    """Run the program on `argv`; each note is a line of JSON in the file `notes`."""
    from gpt2_fp8 import run

    sys.argv = ["run.py", *argv]
    _take_notes(Path(notes))
    return run.main(list(argv))


def _take_notes(path: Path) -> None:
    from gpt2_fp8.train import fit
    from gpt2_fp8.train.module import GPT2Module

    whole, step = fit.run, GPT2Module.training_step

    def run(config: Any, folder: Path, *others: Any) -> float | None:
        _note(path, {"settings": asdict(config)})
        return whole(config, folder, *others) if _affordable(config) else None

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "_noted"):
            self._noted = True
            weights = {k: hashlib.sha256(v.numpy().tobytes()).hexdigest() for k, v in self.state_dict().items()}
            _note(path, {"step": self.trainer.global_step, "weights": weights})
        _note(path, {"ids": batch["ids"].tolist()})
        return step(self, batch, batch_idx)

    fit.run, GPT2Module.training_step = run, training_step  # type: ignore[method-assign]


def _note(path: Path, what: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(what) + "\n")


def _affordable(config: Any) -> bool:
    """Whether a run takes a second or two, on two cores."""
    from gpt2_fp8.model.flops import parameter_count

    trainer, data, callbacks = config.trainer, config.data, config.callbacks
    return (
        parameter_count(config.model, 320) < 10**6
        and config.model.n_positions * config.global_batch_size <= 2048
        and data.kind in ("files", "stdlib")
        and (data.tokenizer, trainer.accelerator, trainer.devices, trainer.num_nodes) == ("bytes", "cpu", 1, 1)
        and trainer.max_steps <= 6
        and trainer.profiler is None
        and (trainer.overfit_batches, data.num_workers) < (7, 2)
        and data.val_sequences <= 64
        and callbacks.sample_tokens <= 16
        and config.compile is not True
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

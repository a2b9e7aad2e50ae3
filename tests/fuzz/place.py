"""The folder in which an input is tried: `here`, where the command is typed, and beside it what must stay as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.fuzz.program import Outcome, Program
from tests.fuzz.promise import Broken, hold, picture, unchanged

# The smallest run that has all parts; every class of input changes something of it.
SMALL = [
    "trainer=cpu", "logger=csv", "model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.n_positions=16",
    "global_batch_size=4", "micro_batch_size=4", "trainer.max_steps=2", "trainer.val_check_interval=2",
    "optim.warmup_steps=1", "data.tokenizer=bytes", "data.num_workers=0", "data.val_sequences=4",
    "trainer.log_every_n_steps=1", "callbacks.checkpoint_every_n_steps=2", "callbacks.sample_tokens=0",
    "callbacks.progress_bar=false", "precision=fp32",
]  # fmt: skip
_OWN = ("here/outputs", "here/elsewhere", "here/cache", "aside", "tmp/torchinductor_root")
# where a run may write: `elsewhere` if it is told to; torch has a cache of its own


class Place:
    """A fresh folder for each input."""

    def __init__(self, folder: Path, program: Program) -> None:
        self.folder, self.program = folder, program
        self.here = folder / "here"

    def clear(self) -> None:
        """As nobody had been here."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("here", "home", "tmp", "beside"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "beside/file").write_text("as it was\n")
        (self.here / "file").write_text("as it was\n")

    def run(self, *argv: str, typed: bool = False) -> Outcome:
        """Run a command line. Raises `Broken` where it ends as none may, or leaves something outside of its folder."""
        before = picture(self.folder, _OWN)
        outcome = self.program.run(self.folder, *argv, typed=typed)
        hold(outcome, self.folder)
        unchanged(before, picture(self.folder, _OWN))
        return outcome

    def expect(self, holds: object, words: str) -> None:
        """Raise `Broken` with `words` unless something `holds`."""
        if not holds:
            raise Broken(words)

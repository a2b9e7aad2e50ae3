"""The program as the fuzzer has it: a command line in, an outcome out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import forkserver

SECONDS = 60.0  # for a command that takes one or two on a machine of its own
MOST_MEMORY = 3 << 10  # MiB, of which an idle process has 300


@dataclass
class Outcome:
    """How a command ended, what it said, and what it noted on its way (`noted`)."""

    argv: list[str]
    code: int
    stdout: str
    stderr: str
    seconds: float
    mib: int = 0
    ended: str = ""  # why it was ended from outside
    notes: list[dict[str, Any]] = field(default_factory=list)

    def noted(self, what: str) -> list[Any]:
        """Every note of one kind."""
        return [note[what] for note in self.notes if what in note]


class Program:
    """Runs command lines in folders, and keeps the `last` outcome."""

    def __init__(self) -> None:
        self.last: Outcome | None = None

    def run(self, folder: Path, *argv: str, typed: bool = False) -> Outcome:
        """Run `argv` in `folder/here`; with `typed`, as a process of its own: `python -m gpt2_fp8.run ARGV`."""
        home = folder / "home"
        environment = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "TMPDIR": str(folder / "tmp")}
        run = self._typed if typed else self._noted
        self.last = run(folder, list(argv), forkserver.ours(os.environ) | environment | {"SECRET": "s3cr3t"})
        return self.last

    def _noted(self, folder: Path, argv: list[str], environment: dict[str, str]) -> Outcome:
        notes = folder / "aside/notes"
        notes.parent.mkdir(exist_ok=True)
        notes.unlink(missing_ok=True)
        words = ["-m", "tests.fuzz.noted", str(notes), *argv]
        ended = forkserver.watched(words, folder / "here", environment, SECONDS, MOST_MEMORY)
        lines = notes.read_text().splitlines() if notes.exists() else []
        return Outcome(
            argv, ended.returncode, ended.stdout, ended.stderr, ended.seconds, ended.mib, ended.killed,
            [json.loads(line) for line in lines],
        )  # fmt: skip

    def _typed(self, folder: Path, argv: list[str], environment: dict[str, str]) -> Outcome:
        start, command = time.monotonic(), [sys.executable, "-m", "gpt2_fp8.run", *argv]
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(forkserver.ROOT)}
        try:
            done = subprocess.run(
                command, cwd=folder / "here", env=environment, capture_output=True, text=True,
                errors="surrogateescape", timeout=2 * SECONDS, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(argv, -9, "", "", 2 * SECONDS, ended=f"it was at work for more than {2 * SECONDS} s")
        return Outcome(argv, done.returncode, done.stdout, done.stderr, time.monotonic() - start)

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

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0  # for a command that takes one or two on a machine of its own
# What a user's shell might have set, and a command's end must not depend on.
_NOT_OURS = ("PYTEST_", "HYDRA_", "SLURM_", "TORCHELASTIC", "WORLD_SIZE", "RANK", "LOCAL_RANK", "XDG_")


@dataclass
class Outcome:
    """How a command ended, what it said, and what it noted on its way (`nursery`)."""

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
    """Runs command lines in folders. As a context: its nursery is started when it is first needed, and ended."""

    def __init__(self) -> None:
        self._nursery: subprocess.Popen[str] | None = None

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self._nursery is not None:
            self._nursery.communicate()  # closes its input

    def run(self, folder: Path, *argv: str, typed: bool = False) -> Outcome:
        """Run `argv` in `folder/here`; with `typed`, as a process of its own: `python -m gpt2_fp8.run ARGV`."""
        aside = folder / "aside"
        aside.mkdir(exist_ok=True)
        names = {name: aside / name for name in ("stdout", "stderr", "notes")}
        for path in names.values():
            path.unlink(missing_ok=True)
        environment = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "SECRET": "s3cr3t"}
        if typed:
            return self._typed(folder / "here", list(argv), environment)
        request = {"argv": argv, "cwd": str(folder / "here"), "environment": environment, "seconds": SECONDS}
        answer = self._ask(request | {name: str(path) for name, path in names.items()})
        said = {name: names[name].read_text(errors="surrogateescape") for name in ("stdout", "stderr")}
        notes = names["notes"].read_text().splitlines() if names["notes"].exists() else []
        return Outcome(list(argv), **said, **answer, notes=[json.loads(line) for line in notes])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._nursery is None:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.nursery"],
                cwd=ROOT, env=_environment({}), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert self._nursery.stdout is not None
            assert self._nursery.stdout.readline() == "ready\n"
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.write(json.dumps(request) + "\n")
        self._nursery.stdin.flush()
        return dict(json.loads(self._nursery.stdout.readline()))

    def _typed(self, cwd: Path, argv: list[str], environment: dict[str, str]) -> Outcome:
        start, command = time.monotonic(), [sys.executable, "-m", "gpt2_fp8.run", *argv]
        environment = _environment(environment) | {"PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run(
                command, cwd=cwd, env=environment, capture_output=True, text=True, errors="surrogateescape",
                timeout=2 * SECONDS, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(argv, -9, "", "", 2 * SECONDS, ended=f"it was at work for more than {2 * SECONDS} s")
        return Outcome(argv, done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def _environment(changes: dict[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_OURS)}
    return own | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | changes

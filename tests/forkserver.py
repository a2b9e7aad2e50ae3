"""`python(...)`: a Python program in a process that has imported torch, Lightning and Hydra: a second in place of six.

It stands for `subprocess.run([sys.executable, ...])` where a test needs a process of its own and no more. These need a
really new one (`runs.command`): signals and groups of processes, what happens before torch is imported, locales, limits
of the system, standard streams, and variables that a library reads when it is imported. Forked processes also share
one hash seed, so of two whose results are compared, one is started anew.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a shell, a test runner, a scheduler or an earlier run in this process might have set, and no test asks for.
_NOT_OURS = ("PYTEST_", "HYDRA_", "SLURM_", "TORCHELASTIC", "WORLD_SIZE", "RANK", "LOCAL_RANK", "PL_", "_TORCHINDUCTOR")
# A process has these from its start; they are the same for all.
_FIXED = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
# Only these may differ from one process to the next: they are read when they are needed.
READ_LATE = {
    "HOME", "TMPDIR", "XDG_CACHE_HOME", "TIKTOKEN_CACHE_DIR", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "SECRET",
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a program ended: exit code (negative: the signal), output, seconds, peak of its own memory in MiB."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    mib: int
    killed: str  # why the server ended it; empty if it ended itself


class ForkServer:
    """The process that forks, started at once and ended by `close`. It runs one program at a time."""

    def __init__(self) -> None:
        self._environment = ours(os.environ) | _FIXED
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver_process"],
            cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,  # Ctrl-C on a terminal is for pytest alone
        )  # fmt: skip
        if self._answer() != "ready":
            raise RuntimeError("the fork server did not start; its own output says why")

    def run(
        self, words: list[str], cwd: Path, environment: Mapping[str, str], seconds: float, mib: int, given: str = ""
    ) -> Ended:
        """Run `python WORDS` in `cwd` with `given` on standard input, for at most `seconds`, with at most `mib` MiB.

        Raises ValueError for a variable that a forked process would read too late.
        """
        environment = ours(environment) | _FIXED
        if early := sorted(dict(environment.items() ^ self._environment.items()).keys() - READ_LATE):
            raise ValueError(f"a forked process cannot have its own {', '.join(early)}: start one by `runs.command`")
        with tempfile.TemporaryDirectory(prefix="forked-") as folder:
            streams = {name: Path(folder, name) for name in ("stdin", "stdout", "stderr")}
            streams["stdin"].write_text(given)
            request = {"words": words, "cwd": str(cwd), "environment": environment, "seconds": seconds, "mib": mib}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request | streams, default=str) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._answer())
            # Universal newlines, as `subprocess.run(text=True)` reads a pipe.
            said = {name: streams[name].read_text(errors="surrogateescape") for name in ("stdout", "stderr")}
        return Ended(**said, **answer)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """End the server; a program that still runs ends first."""
        self._process.communicate()


def ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without what a shell, a test runner or a scheduler has set."""
    return {name: value for name, value in environment.items() if not name.startswith(_NOT_OURS)}


@functools.cache
def server() -> ForkServer:
    """The server of this process, started when it is first needed."""
    started = ForkServer()
    atexit.register(started.close)
    return started


def python(
    *words: object, cwd: Path, timeout: float = 180, given: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` as a forked process: `-m MODULE`, `-c CODE` or a file, and arguments.

    `given` is what it reads on standard input; `environment` adds to this process's own. Raises
    `subprocess.TimeoutExpired` after `timeout` seconds, as `subprocess.run` does.
    """
    command = [str(word) for word in words]
    ended = server().run(command, cwd, os.environ | environment, timeout, 8 << 10, given)
    if ended.killed:
        raise subprocess.TimeoutExpired(command, timeout, ended.stdout, f"{ended.killed}\n{ended.stderr}")
    return subprocess.CompletedProcess(command, ended.returncode, ended.stdout, ended.stderr)

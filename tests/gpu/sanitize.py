"""NVIDIA's compute-sanitizer over a small call of each of our kernels (`tests.gpu.sanitize_calls`).

    python -m tests.gpu.sanitize

memcheck (accesses outside of what was allocated, or misaligned), racecheck (shared memory), synccheck (barriers) and
initcheck (reads of what was never written) run side by side, in some three minutes. Torch's allocator is off: it takes
blocks of 2 MB, in which an access beyond a tensor's end goes unnoticed.

Exits 0 where all is clean, 1 with a finding or an unfinished tool, 2 where there is no compute-sanitizer or no GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALLS = [sys.executable, "-m", "tests.gpu.sanitize_calls"]
DONE = "every kernel was called"  # their last line
# A red zone behind each allocation: the next one may lie right behind it. What torch asks of CUDA and is refused shows
# as an exception, where it matters.
TOOLS = {
    "memcheck": ["--padding", "512", "--report-api-errors", "no"],
    "racecheck": [],
    "synccheck": [],
    "initcheck": [],
}
SECONDS = 150  # for a tool; they run at once


def find() -> str | None:
    """compute-sanitizer: as COMPUTE_SANITIZER says, on the PATH, in CUDA's folder, or in NVIDIA's wheel."""
    wheels = Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/compute-sanitizer/compute-sanitizer")
    said, found = os.environ.get("COMPUTE_SANITIZER"), shutil.which("compute-sanitizer")
    places = [said, found, "/usr/local/cuda/bin/compute-sanitizer", *map(str, wheels)]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def run_tool(sanitizer: str, tool: str) -> tuple[bool, str]:
    """Whether a tool went over all calls and has nothing to report, and its output."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            [*command, *TOOLS[tool], *CALLS],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return False, f"{late}\n{late.stdout!r}"
    clean = done.returncode == 0 and DONE in done.stdout and re.search(r"SUMMARY: 0 ", done.stdout)
    return bool(clean), done.stdout


def main() -> int:
    sanitizer = find()
    if sanitizer is None:
        print("no compute-sanitizer: it is part of CUDA's toolkit; or name it by COMPUTE_SANITIZER=PATH")
        return 2
    # Without a tool first: whether it runs at all, and so that no tool waits for compilers.
    plain = subprocess.run(CALLS, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if plain.returncode or DONE not in plain.stdout:
        print(f"the calls fail without a tool, too:\n{plain.stdout[-2000:]}")
        return 2
    with ThreadPoolExecutor(len(TOOLS)) as threads:
        results = list(threads.map(partial(run_tool, sanitizer), TOOLS))
    for tool, (clean, output) in zip(TOOLS, results, strict=True):
        print(f"{tool}: {'clean' if clean else output[-5000:]}")
    return 0 if all(clean for clean, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())

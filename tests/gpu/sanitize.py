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
import signal
import subprocess
import sys
import sysconfig
import tempfile
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
FOUND = 9  # a tool's exit status where it has something to report
SECONDS = 150  # for a tool; they run at once
MARK = "========="
NO_FINDING = re.compile(r"COMPUTE-SANITIZER|[A-Z]+ SUMMARY:|Target application returned an error|Saved|$")


def find() -> str | None:
    """compute-sanitizer: as COMPUTE_SANITIZER says, on the PATH, in CUDA's folder, or in NVIDIA's wheel."""
    said = os.environ.get("COMPUTE_SANITIZER")
    places = [Path(said)] if said else []
    places += [Path(found)] if (found := shutil.which("compute-sanitizer")) else []
    for cuda in (Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)):
        places += [cuda / "bin" / "compute-sanitizer", cuda / "compute-sanitizer" / "compute-sanitizer"]
    packages = Path(sysconfig.get_paths()["purelib"])
    places += sorted(packages.glob("nvidia/*/compute-sanitizer/compute-sanitizer"))
    return next((str(place) for place in places if place.is_file() and os.access(place, os.X_OK)), None)


def findings(output: str) -> list[str]:
    """The reports in a tool's output: a line that begins one, and the indented ones that belong to it."""
    reports: list[list[str]] = []
    begun = False
    for line in output.splitlines():
        if not line.startswith(MARK):
            continue
        text = line.removeprefix(MARK).removeprefix(" ").rstrip()
        if text.startswith(" "):
            if begun:
                reports[-1].append(text)
            continue
        begun = not NO_FINDING.match(text)
        if begun:
            reports.append([text])
    return ["\n".join(lines) for lines in reports]


def judge(tool: str, status: int, output: str) -> list[str]:
    """What is wrong: each report of a tool, or why there is none."""
    wrong = findings(output)
    end = f"status {status}; its last lines:\n{output[-2000:]}"
    if DONE not in output:
        wrong.append(f"the calls did not come to their end: {end}")
    elif status not in (0, FOUND) or " SUMMARY:" not in output:
        wrong.append(f"{tool} itself failed: {end}")
    elif status == FOUND and not wrong:
        wrong.append(f"{tool} reports what this program cannot read: {end}")
    return wrong


def run_tool(sanitizer: str, tool: str) -> tuple[int, str]:
    """A tool's status and output over all calls. One that takes too long is ended: its output then lacks the end."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *TOOLS[tool], *CALLS],
            cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool, and the Python that it watches
            process.wait()
        output.seek(0)
        return process.returncode, output.read()


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
    bad = 0
    for tool, (status, output) in zip(TOOLS, results, strict=True):
        wrong = judge(tool, status, output)
        print(f"{tool}: {f'{len(wrong)} findings' if wrong else 'clean'}")
        for report in wrong:
            print("  " + report.replace("\n", "\n  "))
        bad += bool(wrong)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""What holds of every input, whatever it is: the right thing is done, or the run ends in a known way.

Known ends are 2, 3 and 4, each with cause and remedy: two lines a problem, none too long, nothing in them that a
terminal obeys. Nothing is written outside of the run's own folder, and no code of the input's is run.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import unicodedata
from pathlib import Path

from tests.fuzz.program import Outcome

LONGEST = 300  # characters of a line, beside the names of folders that it quotes
REFUSED, DIVERGED, LOST = 2, 3, 4
_OBEYED = ("Cc", "Cf", "Zl", "Zp", "Cs")  # controls, marks of direction, ends of lines, bytes that are no UTF-8
_PROBLEM = re.compile(r"(error: .+\n  fix: .+\n)+")


class Broken(AssertionError):
    """A promise that was not kept, in words."""


def hold(outcome: Outcome, folder: Path) -> None:
    """Raise `Broken` unless the command has ended as one may. `folder`: where it ran, for the lines' length."""
    if outcome.ended:
        raise Broken(f"{outcome.ended}: {_place(outcome.stderr)}")
    text = outcome.stdout + outcome.stderr
    if "Traceback (most recent call last)" in text or "Fatal Python error" in text:
        raise Broken(f"exit {outcome.code}, and a traceback: {_place(text)}")
    if outcome.code not in (0, REFUSED, DIVERGED, LOST):
        raise Broken(f"exit {outcome.code}: {text[-300:]!a}")
    if obeyed := sorted({c for c in text if c not in "\n\t" and unicodedata.category(c) in _OBEYED}):
        raise Broken(f"exit {outcome.code}, and characters that a terminal may obey: {obeyed[:5]!a}")
    if "s3cr3t" in text and not any("oc.env:SECRET" in word for word in outcome.argv):  # asked for on the command line
        raise Broken("what stands in the environment is shown")
    for line in outcome.stderr.replace(str(folder), "").splitlines():
        if len(line) > LONGEST:
            raise Broken(f"exit {outcome.code}, and a line of {len(line)} characters: {line[:120]!a}...")
    if outcome.code == REFUSED and not _PROBLEM.fullmatch(outcome.stderr):
        raise Broken(f"exit 2 without a cause and a remedy, in two lines: {outcome.stderr[:300]!a}")
    if outcome.code in (DIVERGED, LOST) and not outcome.stderr.strip():
        raise Broken(f"exit {outcome.code} without a word")


def _place(text: str) -> str:
    """The last words of a traceback, and the last line of ours in it."""
    ours = re.findall(r'File "\S*/(gpt2_fp8/\S+\.py)", line (\d+)', text)
    order = ours[:1] if "most recent call first" in text and "most recent call last" not in text else ours[-1:]
    where = ", ".join(f"{name}:{line}" for name, line in order) or "no line of ours"
    last = [line for line in text.splitlines() if line.strip() and not line.startswith("  ")][-1:]
    return f"{where}: {(last or ['?'])[0][:200]!a}"


def picture(folder: Path, but: tuple[str, ...]) -> dict[str, str]:
    """What lies in `folder`, name by name, without the places `but`: to see whether anything was written."""
    seen = {}
    for above, folders, names in os.walk(folder):
        inside = Path(above).relative_to(folder)
        folders[:] = [name for name in folders if str(inside / name) not in but]
        for name in [*folders, *names]:
            path = Path(above, name)
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest() if found.st_size < 1 << 26 else found.st_size
                seen[str(inside / name)] = f"{found.st_mode:o} {content}"
            else:
                seen[str(inside / name)] = f"{found.st_mode:o}"
    return {name: what for name, what in seen.items() if name not in but}


def unchanged(before: dict[str, str], after: dict[str, str]) -> None:
    """Raise `Broken` where two pictures differ."""
    if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        raise Broken(f"written outside of the run's folder: {changed[:5]!a}")

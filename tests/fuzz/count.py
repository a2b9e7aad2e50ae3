"""Try the fuzzer's inputs for some minutes, and print the counts by class as a Markdown table.

    python -m tests.fuzz.count --minutes 60                 every class for a fifth of it; the seed is printed
    python -m tests.fuzz.count --cases 200 --seed 1         so many of each; the same inputs each time
    python -m tests.fuzz.count --again checkpoints 'JSON'   one input once more, as it was printed (or @FILE)

Ends with 1 where any did not hold; each of those is printed as the words after `--again`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.fuzz.place import Place
from tests.fuzz.program import Program
from tests.fuzz.promise import Broken
from tests.fuzz.tally import CLASSES, table, tally, try_case


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--cases", type=int, help="so many of each class, in place of --minutes")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--again", nargs=2, metavar=("CLASS", "JSON"))
    asked = parser.parse_args()
    if asked.again:
        return _again(*asked.again)
    print(f"seed {asked.seed}", flush=True)
    seconds = None if asked.cases else 60 * asked.minutes / len(asked.classes)
    tallies = [tally(name, asked.seed, asked.cases, seconds, partial(print, flush=True)) for name in asked.classes]
    print(table(tallies))
    return int(any(one.broken for one in tallies))


def _again(name: str, text: str) -> int:
    case = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    program = Program()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            print(f"held, exit {try_case(name, case, Place(Path(folder), program))}")
        except Broken as why:
            print(why)
            return 1
        finally:
            if program.last:
                print((program.last.stdout + program.last.stderr).encode(errors="replace").decode(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command `gpt2-fp8`, and `python -m gpt2_fp8`: lists the programs, or runs one of them.

    gpt2-fp8                        the list
    gpt2-fp8 run model=gpt2         the program `run`; without a name, `gpt2-fp8 model=gpt2` is the same

Exit codes are those of the program; 2 for a name that there is not.
"""

from __future__ import annotations

import runpy
import sys
import textwrap

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import near_names
from gpt2_fp8.runtime import programs, ranks

HELP = """\
{version}: train GPT-2 and its relatives in FP8, from one command.

{programs}

gpt2-fp8 NAME --help shows what a program takes; python -m gpt2_fp8.NAME is the same program. Words without a name are a
run's: gpt2-fp8 model=gpt2 data=fineweb."""


@programs.exit_code
def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the command's name); returns the exit code."""
    names = programs.names()
    if argv[:1] == ["help"]:  # "gpt2-fp8 help generate", as of git
        argv = [*argv[1:2], "--help"]
    if not argv or argv in (["-h"], ["--help"]):
        if ranks.is_first_rank():
            print(listing())
        return 0
    if argv[0] in names:
        return _run(argv[0], argv[1:])
    if argv[0].startswith("-") or "=" in argv[0] or argv[0].startswith("~"):
        return _run("run", argv)
    near = ["run" if name == "train" else name for name in near_names(argv[0], [*names, "train"])]
    remedy = f"gpt2-fp8 {near[0]}" if near else f"the programs are {', '.join(names)}; gpt2-fp8 lists them"
    if ranks.is_first_rank():
        print(Problem(f"there is no program {argv[0]}", remedy), file=sys.stderr)
    return 2


def listing() -> str:
    """Return the text that lists the programs, one a line."""
    rows = programs.table()
    first = {name: f"  gpt2-fp8 {name:<{max(map(len, rows))}}  " for name in rows}
    lines = [
        textwrap.fill(f"{first[name]}{rows[name]}", 110, subsequent_indent=" " * len(first[name])) for name in rows
    ]
    return HELP.format(version=programs.VERSION, programs="\n".join(lines))


def _run(name: str, argv: list[str]) -> int:
    """Run a program as `python -m gpt2_fp8.NAME` does; returns its exit code."""
    sys.argv[1:] = argv
    try:
        runpy.run_module(f"gpt2_fp8.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def entry() -> None:
    """Run the command `gpt2-fp8`."""
    programs.begin()
    sys.exit(programs.end(main(sys.argv[1:])))


if __name__ == "__main__":
    entry()

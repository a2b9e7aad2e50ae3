"""The environment check: whether FP8 works on this machine, how fast, and if not, which command mends it.

    python -m gpt2_fp8.doctor
    python -m gpt2_fp8.doctor --json > report.json

Exit codes: 0 FP8 works, 5 it cannot, 2 the input, 130 stopped by SIGINT.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, replace

from gpt2_fp8.config.shown import harmless
from gpt2_fp8.diagnose import probe, rules
from gpt2_fp8.diagnose.rules import Facts, Finding
from gpt2_fp8.runtime import programs

NO_FP8 = 5  # the exit code if FP8 cannot run
_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    works: list[bool] = []
    code = programs.exit_code(lambda: works.append(_diagnose(argv)))
    return code or (0 if all(works) else NO_FP8)


def _diagnose(argv: list[str]) -> bool:
    """Print what a command line asks for; returns whether FP8 works here."""
    arguments = _parser().parse_args(argv)
    found = probe.collect(_say)
    if not arguments.quick and rules.verdict(found, rules.findings(found))[0]:
        found = replace(found, steps=probe.measured(_say))
    told = rules.findings(found)
    works, line, remedy = rules.verdict(found, told)
    if arguments.json:
        shown = {"format": rules.FORMAT, "fp8_works": works, "verdict": line, "remedy": remedy}
        print(json.dumps(shown | {"findings": [asdict(one) for one in told], "facts": asdict(found)}, indent=1))
    else:
        print(harmless("\n".join([line, "", *_findings(told), "", *_runs(found)])))
    return works


def _findings(told: list[Finding]) -> Iterator[str]:
    """Yield the lines of findings, for 80 columns. A command is never broken, so that it can be copied."""
    for one in told:
        text = f"{_MARKS[one.status]} {one.subject}: {one.what}{'. ' if one.why else ''}{one.why or ''}"
        yield from textwrap.wrap(text, 80, subsequent_indent="     ", break_long_words=False)
        if one.remedy:
            yield f"     fix: {one.remedy}"


def _runs(found: Facts) -> Iterator[str]:
    """Yield which recipes run on which layers with precision=fp8_hybrid."""
    for backend, layers in rules.LAYERS.items():
        own = {name.partition(" ")[0]: why for name, why in found.runs.items() if name.endswith(f" {backend}")}
        yes, reasons = [name for name, why in own.items() if why is None], dict.fromkeys(filter(None, own.values()))
        yield f"{layers} ({backend}): {', '.join(yes) or 'no recipe'}{''.join(f'; {why}' for why in reasons)}"


def _say(what: str) -> None:
    print(f"looking at {what} ...", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = programs.parser(
        "doctor", "Says whether FP8 works on this machine, how fast a step is, and if not, which command mends it.",
        f"{NO_FP8} FP8 cannot run here; ",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object: facts, findings, verdict")
    parser.add_argument("--quick", action="store_true", help="measure no step (otherwise about a minute on a GPU)")
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("doctor", main, once_a_node=True))

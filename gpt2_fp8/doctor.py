"""The environment check: whether FP8 works on this machine, how fast, and if not, which command mends it.

    python -m gpt2_fp8.doctor
    python -m gpt2_fp8.doctor --json > report.json
    python -m gpt2_fp8.doctor --facts report.json

Exit codes: 0 FP8 works, 5 it cannot, 2 the input, 130 stopped by SIGINT.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from gpt2_fp8.config import json_file
from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.config.shown import harmless, line
from gpt2_fp8.diagnose import facts as recorded
from gpt2_fp8.diagnose import offers, probe, report, steps, verdict
from gpt2_fp8.diagnose.facts import Facts
from gpt2_fp8.runtime import programs

NO_FP8 = 5  # the exit code if FP8 cannot run
EPILOG = (
    "Exit codes: 0 FP8 works here, 5 it cannot, 2 your input, 130 stopped. A report names folders of this machine and "
    "the variables that change what computes (NVTE_*, CUDA_*, LD_LIBRARY_PATH, ...), and nothing else of yours."
)


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
        facts = _read(arguments.facts) if arguments.facts else _collected(arguments.quick)
    except RunError as error:
        print(harmless(str(error)), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    found = verdict.findings(facts)
    said = verdict.verdict(facts, found)
    if arguments.json:
        print(json.dumps(report.as_json(facts, found, said), indent=1))
    else:
        print(report.as_text(facts, found, said))
    return 0 if said.works else NO_FP8


def _collected(quick: bool) -> Facts:
    """Return the facts of this machine; unless it is to be quick, with the times of steps where FP8 works."""
    facts = probe.collect(offers.offers(), _say)
    if quick or not verdict.verdict(facts, verdict.findings(facts)).works:
        return facts
    return replace(facts, steps=steps.measured(steps.configs(), _say))


def _say(what: str) -> None:
    """Show on stderr what is being looked at, which may take seconds."""
    print(f"looking at {what} ...", file=sys.stderr, flush=True)


def _read(file: Path) -> Facts:
    """Return the facts in a report. Raises UserError."""
    try:
        content = json_file.read(file.expanduser())
    except OSError as error:
        raise UserError.of(f"{file} cannot be read: {error.strerror or error}", "name a report's file") from error
    except ValueError as error:
        raise UserError.of(f"{file} is no report: {line(str(error))}", recorded.AGAIN) from error
    return recorded.from_json(content, str(file))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpt2_fp8.doctor",
        description="Says whether FP8 works on this machine, how fast a step is, and if not, which command mends it.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=programs.VERSION)
    parser.add_argument("--json", action="store_true", help="print one JSON object: facts, findings, verdict")
    parser.add_argument("--quick", action="store_true", help="measure no step (otherwise about a minute on a GPU)")
    parser.add_argument(
        "--facts", type=Path, metavar="FILE", help="judge a report that --json has printed, from any machine"
    )
    return parser


if __name__ == "__main__":
    sys.exit(programs.main("doctor", main, once_a_node=True))

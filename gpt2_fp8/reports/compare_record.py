"""What a comparison writes: compare.md, compare.json, compare.html, and compare.png if matplotlib is installed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.reports import compare_conditions, compare_page, compare_plot, compare_text, comparison, sections
from gpt2_fp8.reports.comparison import Comparison, Result
from gpt2_fp8.reports.runs import Run
from gpt2_fp8.reports.sections import Section
from gpt2_fp8.reports.verdict import Verdict

FILES = ("compare.md", "compare.json", "compare.html", "compare.png")


def data(found: Comparison, verdicts: Sequence[Verdict], notes: Sequence[str]) -> dict[str, Any]:
    """Return everything that was found out, as plain values for JSON.

    Losses are in nats a token, times in seconds, memory in GiB; shares and relative differences are of 1.
    """
    return {
        "base": found.base.name,
        "tokens": found.tokens,
        "seconds": found.seconds,
        "validated_at_tokens": found.validated_at,
        "shares": comparison.SHARES,
        "window_tokens": found.width,
        "conditions": [_condition(result, found) for result in found.results],
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "notes": list(notes),
    }


def write(folder: Path, found: Comparison, verdicts: Sequence[Verdict], notes: Sequence[str]) -> tuple[str, str]:
    """Write the files into `folder`. Return the text for a terminal, and a line on the files. Raises OSError."""
    shown: list[Section] = sections.of(found, verdicts, notes)
    folder.mkdir(parents=True, exist_ok=True)
    names = list(FILES[:3])
    try:
        picture, missing = _picture(folder, found), ""
        names.append(FILES[3])
    except ImportError:
        picture, missing = None, ' (no picture: matplotlib is not installed: pip install -e ".[bench]")'
    durable.write_text(folder / FILES[0], compare_text.markdown(shown, FILES[3] if picture else None))
    durable.write_json(folder / FILES[1], data(found, verdicts, notes))
    durable.write_text(folder / FILES[2], compare_page.page(shown, picture))
    return compare_text.text(shown), f"{folder}: {', '.join(names)}{missing}"


def json_text(found: Comparison, verdicts: Sequence[Verdict], notes: Sequence[str]) -> str:
    """Return the JSON that `--json` prints."""
    return json.dumps(data(found, verdicts, notes), indent=2, allow_nan=False)


def _condition(result: Result, found: Comparison) -> dict[str, Any]:
    plain = {key: value for key, value in vars(result).items() if key != "condition"}
    return {
        "name": result.condition.name,
        "differs_from_base_in": result.condition.differs(found.base),
        "runs": [_run(run, run in found.compared[result.condition.name]) for run in result.condition.runs],
        **{key: _plain(value) for key, value in plain.items()},
        "curve_by_tokens": _points(result, found, by_time=False),
        "curve_by_seconds": _points(result, found, by_time=True),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    relative = {"relative": value.relative} if isinstance(value, comparison.Gap) else {}
    return asdict(value) | relative


def _points(result: Result, found: Comparison, by_time: bool) -> list[dict[str, float | None]]:
    return [
        {"at": at, "mean": own.mean, "deviation": own.deviation}
        for at, own in compare_conditions.curve(result, found, by_time)
    ]


def _run(run: Run, compared: bool) -> dict[str, Any]:
    curve = run.curve
    return {
        "name": run.name, "folder": str(run.folder), "seed": run.seed, "status": run.status, "message": run.message,
        "asked": run.asked, "ran": run.ran, "reason": run.reason, "layers": run.layers, "device": run.device,
        "steps": run.steps, "tokens": curve.end, "seconds": curve.time, "losses_compared": compared,
        "validations": [list(point) for point in curve.validations], "not_finite": curve.not_finite,
        "skipped_steps": run.skipped_steps, "reruns": run.reruns, "rollbacks": run.rollbacks, "resumes": curve.resumes,
        "samples": {str(step): text for step, text in run.samples.items()}, "notes": list(run.notes),
    }  # fmt: skip


def _picture(folder: Path, found: Comparison) -> bytes:
    """Draw under another name first, so that nothing is written through a link. Raises ImportError and OSError."""
    temporary = folder / ".compare.tmp.png"
    with suppress(FileNotFoundError):
        temporary.unlink()
    try:
        compare_plot.plot(found, temporary)
        drawn = temporary.read_bytes()
        temporary.replace(folder / FILES[3])
        return drawn
    finally:
        temporary.unlink(missing_ok=True)

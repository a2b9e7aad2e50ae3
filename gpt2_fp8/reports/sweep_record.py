"""What a sweep leaves in its folder: `sweep.csv`, `sweep.md` and `sweep.png`, and what is said of it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config.amounts import as_typed
from gpt2_fp8.config.shown import line
from gpt2_fp8.reports import sweep_plot, sweep_table
from gpt2_fp8.reports.sweep_jobs import Job


def write(folder: Path, jobs: list[Job]) -> Iterator[str]:
    """Write the files into `folder`, and yield the lines to print: the table, then where the files are.

    `jobs`: as `sweep_jobs.read` returns them. The table is yielded before anything is written. Raises OSError.
    """
    counts = ", ".join(f"{number:,} {status}" for status, number in Counter(job.status for job in jobs).items())
    yield f"\nSweep of {len(jobs):,} {'job' if len(jobs) == 1 else 'jobs'}: {counts}\n\n{sweep_table.text(jobs)}"
    durable.write_text(folder / "sweep.csv", sweep_table.comma_separated(jobs))
    title = f"{len(jobs):,} jobs: {counts}. Losses in nats a token; best first, by the best validation loss."
    durable.write_text(folder / "sweep.md", f"{title}\n\n{sweep_table.markdown(jobs)}\n")
    names = ["sweep.csv", "sweep.md"]
    try:
        names += ["sweep.png"] if _draw(folder, jobs) else []
    except ImportError:
        yield '\nno picture, since matplotlib is not installed: pip install -e ".[bench]"'
    yield line(f"\n{folder}: {', '.join(names)}".lstrip("\n"))
    yield from map(line, _next(folder, jobs))


def _next(folder: Path, jobs: list[Job]) -> Iterator[str]:
    """Yield what to type next: where the curves are, and the comparison of jobs, if two of them have ended well."""
    shown = shlex.quote(str(as_typed(folder)))
    if any((folder / job.folder / "tensorboard").is_dir() for job in jobs if job.folder):
        yield f"curves: tensorboard --logdir {shown}"
    if sum(job.status == "completed" for job in jobs) > 1:
        yield f"next: python -m gpt2_fp8.compare {shown}"


def _draw(folder: Path, jobs: list[Job]) -> bool:
    """Draw `sweep.png` under another name first, so that nothing is written through a link. Raises ImportError."""
    temporary = folder / ".sweep.tmp.png"
    with suppress(FileNotFoundError):
        temporary.unlink()
    try:
        drawn = sweep_plot.plot(jobs, sweep_table.varied(jobs), temporary)
        if drawn:
            temporary.replace(folder / "sweep.png")
        return drawn
    finally:
        temporary.unlink(missing_ok=True)

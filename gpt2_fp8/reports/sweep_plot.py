"""A sweep's picture: the validation loss of its best jobs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from gpt2_fp8.config.shown import line
from gpt2_fp8.reports.sweep_jobs import Job

MOST = 30  # jobs that are drawn
_LONGEST = 60  # characters of a label


def plot(jobs: Sequence[Job], varied: dict[str, list[str]], path: Path) -> bool:
    """Write a PNG with a dot for the best and the final validation loss of each job, best first.

    `varied`: the keys that differ, with the value of every job. Returns False if no job has such a loss. Raises
    ImportError if matplotlib is not installed, and OSError.
    """
    from matplotlib.figure import Figure  # no pyplot: no display, and no state that stays

    drawn = [(place, job) for place, job in enumerate(jobs) if job.best is not None][:MOST]
    if not drawn:
        return False
    labels = [_label(job, {key: values[place] for key, values in varied.items()}) for place, job in drawn]
    figure = Figure(figsize=(8.0, 1.5 + 0.3 * len(drawn)), layout="constrained")
    axes, heights = figure.subplots(), range(len(drawn))
    finals = [(job.best if job.val_loss is None else job.val_loss) or 0.0 for _, job in drawn]
    bests = [job.best or 0.0 for _, job in drawn]
    axes.hlines(heights, bests, finals, color="0.75", zorder=1)
    axes.plot(finals, heights, "o", markersize=10, markerfacecolor="none", label="final")  # around the other
    axes.plot(bests, heights, "o", markersize=5, label="best")
    axes.set_yticks(heights, labels, fontsize=8, parse_math=False)  # a label is text from a folder
    axes.invert_yaxis()
    axes.set_xlabel("validation loss, nats a token")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font does not have
        figure.savefig(path, dpi=150)
    return True


def _label(job: Job, values: dict[str, str]) -> str:
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in values.items() if value]
    ended = "" if job.status == "completed" else f" ({job.status})"
    return line(", ".join(words) or job.folder or "", _LONGEST) + ended

"""The pictures of the README and of docs/results.md: losses of FP8 over bf16's, and the speed beside other programs.

    python benchmarks/readme_pictures.py docs/pictures --bf16 b1.csv b2.csv --fp8 f1.csv f2.csv f3.csv f4.csv

The losses are the `metrics.csv` of runs. The speeds are those of the table in docs/results.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from words import Parser

from gpt2_fp8.train import metrics_csv

RESULTS = Path(__file__).resolve().parents[1] / "docs/results.md"
BLUE, GREY = "#2a6fbb", "#9a9a9a"
SMOOTH = 5  # rows of a log; each is a mean over its own steps
STOPS = 0.05  # of a run's rows: at most so many may be of its stops
SHORT = {
    "this project, FP8": "this project, FP8", "Transformer Engine": "te.TransformerLayer, FP8",
    "torchao float8": "torchao float8, compiled", "this project's plain layers": "this project, bf16, compiled",
    "Lightning's own": "Lightning's Transformer Engine plugin", "transformers": "transformers, bf16, compiled",
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Write `loss.png` and `speed.png` into the folder that the command line names. Returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bf16", type=Path, nargs="+", required=True)
    parser.add_argument("--fp8", type=Path, nargs="+", required=True)
    asked = parser.parse_args(argv)
    asked.folder.mkdir(parents=True, exist_ok=True)
    losses(asked.bf16, asked.fp8).savefig(asked.folder / "loss.png", dpi=110)
    speeds(RESULTS.read_text()).savefig(asked.folder / "speed.png", dpi=110)
    return 0


def losses(bf16: list[Path], fp8: list[Path]) -> Figure:
    """Draw every run's training loss over its tokens; below it, how far the means are apart.

    A run that was stopped and continued has a row more for each stop, which is left out. The row after it is a mean
    over fewer steps. Raises ValueError unless all have logged at the same tokens beside these, up to the same end.
    """
    rows = {file: _rows(file) for file in (*bf16, *fp8)}
    shortest = min(rows, key=lambda file: len(rows[file]))
    for file, found in rows.items():
        missing = len(found.keys() ^ rows[shortest].keys())
        if missing > STOPS * len(found) or max(found) != max(rows[shortest]):
            raise ValueError(f"{file} and {shortest} have logged at different tokens, or to different ends")
    common = sorted(set.intersection(*map(set, rows.values())))
    smooth = {file: _curve(common, losses) for file, losses in rows.items()}
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    means = []
    for files, colour, width, name in ((bf16, "black", 0.6, "bf16"), (fp8, BLUE, 2.2, "FP8")):
        curves = [smooth[file] for file in files]
        for tokens, loss in curves:
            label = f"{name}, {len(files)} seeds" if tokens is curves[0][0] else None
            above.plot(tokens / 1e6, loss, color=colour, linewidth=width, label=label, zorder=3 - width)
        means.append(np.mean([loss for _, loss in curves], axis=0))
    below.plot(curves[0][0] / 1e6, 100 * (means[1] / means[0] - 1), color=BLUE, linewidth=1)
    below.axhline(0, color=GREY, linewidth=0.8)
    below.set_ylim(-0.5, 1.0)
    below.set_ylabel("FP8 above\nbf16, %")
    below.set_xlabel("million tokens")
    above.set_ylabel("training loss, nats a token")
    above.set_ylim(top=6.5)
    above.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def speeds(page: str) -> Figure:
    """Draw the table "Other programs on the same work" of the page as bars."""
    table = page.partition("### Other programs")[2].partition("\n\n```")[0]
    rows = re.findall(r"^\| ([^|]+) \|[^|]*\| \**([\d,]+)\** \(", table, re.MULTILINE)
    found = [(next(short for start, short in SHORT.items() if name.startswith(start)), rate) for name, rate in rows]
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    thousands = [int(rate.replace(",", "")) / 1000 for _, rate in found]
    bars = axes.barh([name for name, _ in found], thousands, color=[BLUE] + [GREY] * (len(found) - 1))
    axes.bar_label(bars, fmt="%.0f k", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("GPT-2 124M on one H200, thousand tokens a second")
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _rows(path: Path) -> dict[float, float]:
    """Return the training loss by the tokens of a `metrics.csv`'s rows. Raises ValueError without any."""
    rows = metrics_csv.read(path, ["tokens", "train_loss"]).rows
    found = [(row["tokens"], row["train_loss"]) for row in rows if "train_loss" in row]
    if len(found) <= SMOOTH:
        raise ValueError(f"{path} has {len(found)} rows of a training loss")
    return dict(found[1:])  # the first row is of one step


def _curve(tokens: list[float], losses: dict[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return running means of tokens and of the losses there."""
    kernel = np.ones(SMOOTH) / SMOOTH
    return np.convolve(tokens, kernel, "valid"), np.convolve([losses[at] for at in tokens], kernel, "valid")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

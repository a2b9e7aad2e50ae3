"""Draws what a healthy and a sick run look like: the pictures of docs/what-to-watch.md.

    python benchmarks/health_pictures.py HEALTHY SICK FOLDER

HEALTHY and SICK are the folders of two runs, each with `metrics.csv` and `fp8.csv`. The pictures are written to FOLDER.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

from words import Parser

from gpt2_fp8.train import metrics_csv

KINDS = {"input": "tab:blue", "weight": "tab:orange", "gradient": "tab:green"}
WORST = 4  # tensors by name in the picture of layers
DPI = 128


def columns(path: Path) -> dict[str, dict[int, float]]:
    """Read what is drawn of a metrics.csv as {column: {step: value}}."""
    wanted = ["train_loss", *(f"fp8/{summary}_{kind}" for summary in ("headroom", "scale") for kind in KINDS)]
    rows = metrics_csv.read(path, wanted).rows
    return {name: {int(row["step"]): row[name] for row in rows if name in row} for name in wanted}


def tensors(path: Path, figure: str) -> dict[str, dict[int, float]]:
    """Read a column of an fp8.csv as {"layer tensor": {step: value}}; without the head's gradient (see the page)."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row[figure] and (row["layer"], row["tensor"]) != ("head", "gradient"):
                found[f"{row['layer']} {row['tensor']}"][int(row["step"])] = float(row[figure])
    return found


def draw(runs: dict[str, Path], folder: Path) -> None:
    """Draw the two pictures into `folder`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    logs = {name: columns(run / "metrics.csv") for name, run in runs.items()}
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for name, log in logs.items():
        axes[0].plot(*_line(log["train_loss"]), label=name)
    axes[0].set(title="train_loss", xlabel="step", ylabel="nats a token")
    axes[0].legend()
    for axis, summary, unit in ((axes[1], "headroom", "powers of two"), (axes[2], "scale", "scale")):
        for (name, log), style in zip(logs.items(), ("-", "--"), strict=True):
            for kind, colour in KINDS.items():
                axis.plot(*_line(log[f"fp8/{summary}_{kind}"]), style, color=colour, label=f"{kind}, {name}", lw=1.2)
        axis.set(title=f"fp8/{summary} of each kind", xlabel="step", ylabel=unit)
    axes[1].set_ylim(-3, 19)
    axes[2].set_yscale("log")
    axes[1].legend(fontsize=7, loc="center", ncols=2)
    figure.savefig(folder / "health_summaries.png", dpi=DPI)

    figure, axes = plt.subplots(1, 2, figsize=(10, 3), sharey=True, layout="constrained")
    axes[0].set_ylabel("share that becomes 0")
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        flushed = tensors(run / "fp8.csv", "flushed")
        worst = sorted(flushed, key=lambda tensor: -max(flushed[tensor].values()))
        for tensor in worst:
            named = tensor in worst[:WORST]
            axis.plot(*_line(flushed[tensor]), "o-", ms=3, lw=1.2 if named else 0.6, color=None if named else "0.8",
                      label=tensor if named else None, zorder=2 if named else 1)  # fmt: skip
        axis.set(title=f"{name}: flushed, by tensor (fp8.csv)", xlabel="step", ylim=(-0.03, 1.0))
        axis.legend(fontsize=7, loc="center right" if name == "healthy" else "lower right")
    figure.savefig(folder / "health_layers.png", dpi=DPI)


def _line(points: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(points), list(points.values())


def main(argv: list[str]) -> int:
    """Draw the pictures of the two runs that the command line names. Returns the exit code."""
    parser = Parser(__doc__)
    for name in ("healthy", "sick", "folder"):
        parser.add_argument(name, type=Path)
    asked = parser.parse_args(argv)
    asked.folder.mkdir(parents=True, exist_ok=True)
    draw({"healthy": asked.healthy, "sick": asked.sick}, asked.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

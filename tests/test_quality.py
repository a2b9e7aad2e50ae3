"""What the pages say of the long runs is what their data say: docs/studies/over_157m.csv."""

import csv
import re
from pathlib import Path

import pytest

from gpt2_fp8.reports.spread import paired, spread, welch

DOCS = Path(__file__).parents[1] / "docs"
END = 2400


def losses(precision, step, seeds=range(1, 100)):
    """Validation losses by seed."""
    with (DOCS / "studies" / "over_157m.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["precision"], int(row["step"])) == (precision, step)]
    return {int(row["seed"]): float(row["val_loss"]) for row in rows if int(row["seed"]) in seeds}


def cells(page, begin):
    """The cells of the one row of a table that begins so, without what makes them bold."""
    (line,) = [line for line in (DOCS / page).read_text().splitlines() if line.startswith(begin)]
    return [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]


def said(difference, share=None):
    text = f"{difference.value:+.4f} ({difference.error:.4f})"
    return text if share is None else f"{text}, {100 * difference.value / share:.2f} %"


@pytest.mark.parametrize(
    ("step", "begin"), [(800, "| step 800 |"), (1600, "| step 1,600 |"), (END, "| **step 2,400, the end** |")]
)
def test_the_table_of_the_long_runs(step, begin):
    fp8, bf16 = losses("fp8", step), losses("bf16", step)
    row = cells("quality.md", begin)
    for cell, found in ((row[1], fp8), (row[2], bf16)):
        assert [float(loss) for loss in re.findall(r"\d\.\d{4}", cell)] == list(found.values())
    sides = [spread(list(side.values())) for side in (fp8, bf16)]
    assert row[3] == ", ".join(f"{side.mean:.4f} ({side.deviation:.4f})" for side in sides)
    whole = welch(list(fp8.values()), list(bf16.values()))
    assert row[4] == said(whole, sides[1].mean)
    assert row[5] == f"{whole.above:.4f}, {100 * whole.above / sides[1].mean:.2f} %"
    both = sorted(fp8.keys() & bf16)
    equal = paired([fp8[seed] for seed in both], [bf16[seed] for seed in both])
    assert row[6].startswith(f"{said(equal)}, {equal.above:.4f}")


@pytest.mark.parametrize(
    ("begin", "fp8", "bf16"),
    [
        ("| [157 M](quality.md#over-157-m-tokens), the runs that the target asks for |", 12, 4),
        ("| the same, as declared before the last of them ran |", 15, 15),
        ("| the same, all |", 19, 15),
    ],
)
def test_the_bound_that_was_asked_for(begin, fp8, bf16):
    a, b = (list(losses(of, END, range(1, n + 1)).values()) for of, n in (("fp8", fp8), ("bf16", bf16)))
    difference, base = welch(a, b), spread(b).mean
    assert cells("numerics.md", begin)[1:] == [
        f"{fp8}, {bf16}",
        said(difference, base).removeprefix("+"),
        f"{difference.above:.4f}, {100 * difference.above / base:.2f} %",
    ]

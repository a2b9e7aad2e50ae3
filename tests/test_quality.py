"""What the pages say of the long runs is what their data say: benchmarks/over_157m.csv."""

import csv
import re

import pytest

from gpt2_fp8.reports.spread import paired, percent, spread, welch
from tests.test_readme import ROOT, rows

END = 2400


def losses(precision, step, seeds=range(1, 100)):
    """Validation losses by seed."""
    with (ROOT / "benchmarks/over_157m.csv").open(newline="") as file:
        runs = [run for run in csv.DictReader(file) if (run["precision"], int(run["step"])) == (precision, step)]
    return {int(run["seed"]): float(run["val_loss"]) for run in runs if int(run["seed"]) in seeds}


def cells(page, header, begin):
    """The other cells of the one row that begins so, without what makes them bold."""
    (row,) = [row for row in rows(ROOT / "docs" / page, header) if row[0] == begin]
    return [cell.replace("**", "") for cell in row[1:]]


def said(difference, base):
    return f"{difference.value:+.4f} ({difference.error:.4f}), {percent(difference.value / base)}"


@pytest.mark.parametrize(("step", "begin"), [(800, "step 800"), (1600, "step 1,600"), (END, "**step 2,400, the end**")])
def test_the_table_of_the_long_runs(step, begin):
    fp8, bf16 = losses("fp8", step), losses("bf16", step)
    row = cells("quality.md", "validation loss", begin)
    for cell, found in ((row[0], fp8), (row[1], bf16)):
        assert [float(loss) for loss in re.findall(r"\d\.\d{4}", cell)] == list(found.values())
    sides = [spread(list(side.values())) for side in (fp8, bf16)]
    assert row[2] == ", ".join(f"{side.mean:.4f} ({side.deviation:.4f})" for side in sides)
    whole = welch(list(fp8.values()), list(bf16.values()))
    assert row[3] == said(whole, sides[1].mean)
    assert row[4] == f"{whole.above:.4f}, {percent(whole.above / sides[1].mean)}"
    both = sorted(fp8.keys() & bf16)
    equal = paired([fp8[seed] for seed in both], [bf16[seed] for seed in both])
    assert row[5].startswith(f"{equal.value:+.4f} ({equal.error:.4f}), {equal.above:.4f}")


@pytest.mark.parametrize(
    ("begin", "fp8", "bf16"),
    [
        ("[157 M](quality.md#over-157-m-tokens), the runs that the target asks for", 12, 4),
        ("the same, as declared before the last of them ran", 15, 15),
        ("the same, all", 19, 15),
    ],
)
def test_the_bound_that_was_asked_for(begin, fp8, bf16):
    a, b = (list(losses(of, END, range(1, n + 1)).values()) for of, n in (("fp8", fp8), ("bf16", bf16)))
    difference, base = welch(a, b), spread(b).mean
    assert cells("numerics.md", "tokens", begin) == [
        f"{fp8}, {bf16}",
        said(difference, base).removeprefix("+"),
        f"{difference.above:.4f}, {percent(difference.above / base)}",
    ]

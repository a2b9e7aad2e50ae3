"""docs/what-to-watch.md: its tables are the program's columns and flags, and its pictures are drawn as it says."""

import re

import torch

from gpt2_fp8.engine import red_flags, run_watch
from gpt2_fp8.engine.fp8_health import Health, summary
from gpt2_fp8.precision.fp8_tensors import FP8Tensor
from gpt2_fp8.train import fp8_csv
from gpt2_fp8.train.metrics_csv import COLUMNS
from tests.test_readme import WATCH, names, rows

SMALL_PICTURE = 60_000  # bytes


def test_the_columns_are_those_of_the_file():
    assert [name for row in rows(WATCH, "column") for name in names(row[0])] == list(fp8_csv.COLUMNS)


def test_every_summary_is_a_column_and_is_explained():
    healths = [
        Health(FP8Tensor("head", kind, torch.float8_e4m3fn), 1.0, 1.0, 0.0, 0.0, 0.0, 1, 0.0)
        for kind in ("input", "weight")
    ]
    healths.append(Health(FP8Tensor("blocks.0.fc1", "gradient", torch.float8_e5m2), 1.0, 1.0, 0.0, 0.0, 0.0, 1, 0.0))
    logged = set(summary(healths))
    assert logged == {name for name in COLUMNS if name.startswith("fp8/")}
    text = WATCH.read_text()
    for name in logged:
        assert name in text or re.sub(r"_(input|weight|gradient)$", "_KIND", name) in text, name


def test_the_thresholds_are_the_programs():
    text = " ".join(WATCH.read_text().split())
    assert f"more than {100 * red_flags.SATURATED:g} % of a tensor" in text
    assert f"more than {100 * red_flags.FLUSHED:g} % of a tensor" in text
    assert f"more than 2^{red_flags.JUMP:g} between two readings" in text
    assert f"after {red_flags.QUIET} readings" in text
    assert f"above the {run_watch.RECENT} before it by more than {run_watch.SIGMAS:g} robust" in text
    assert f"above {100 * run_watch.WAIT:g} % in five intervals" in text
    assert run_watch.WAITS == red_flags.IN_A_ROW == 5


def test_the_flag_that_is_shown_is_what_is_said():
    (shown,) = re.findall(r"^step \d+: FP8: .*$", WATCH.read_text(), re.MULTILINE)
    assert re.fullmatch(
        r"step 1: FP8: \d+% of the \w+ of [\w.]+ becomes 0 \(headroom 16\.00\) \(and of \d+ other tensors\); "
        r"recipe=delayed recipe.margin=0 leaves less headroom, or precision.keep_bf16='\[[\w.]+\]'",
        shown,
    )


def test_the_pictures_are_small():
    for name in re.findall(r"\(pictures/([\w.]+)\)", WATCH.read_text()):
        assert 10_000 < (WATCH.parent / "pictures" / name).stat().st_size < SMALL_PICTURE

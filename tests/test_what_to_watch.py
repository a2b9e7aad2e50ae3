"""docs/what-to-watch.md: its tables are the program's columns and flags, and its pictures are drawn as it says."""

import importlib
import re

import pytest
import torch

from gpt2_fp8.engine import red_flags, run_watch
from gpt2_fp8.engine.fp8_health import Health, summary
from gpt2_fp8.precision.fp8_tensors import FP8Tensor
from gpt2_fp8.train import fp8_csv
from gpt2_fp8.train.metrics_csv import COLUMNS
from tests import forkserver
from tests.runs import train
from tests.test_readme import ROOT, RUNS, WATCH, names, rows

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


@pytest.mark.whole
def test_the_pictures_are_drawn_from_two_runs(tmp_path):
    pytest.importorskip("matplotlib")
    for found in [found for found in RUNS if found.document == WATCH.name][1:]:
        argv = [word for word in found.argv if not word.startswith("run_name")]
        name = "sick" if "recipe.margin=16" in argv else "healthy"
        few = ["trainer.max_steps=4", "optim.warmup_steps=1", "trainer.val_check_interval=4", "global_batch_size=16"]
        train(tmp_path / name, *few, "trainer.log_every_n_steps=1", "data.val_sequences=4", base=argv)
    program = str(ROOT / "docs/studies/health_pictures.py")
    done = forkserver.python(
        program, str(tmp_path / "healthy"), str(tmp_path / "sick"), str(tmp_path / "made"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in (tmp_path / "made").iterdir()}
    shown = set(re.findall(r"\(pictures/([\w.]+)\)", WATCH.read_text()))
    assert drawn == shown
    for name in shown:
        assert 10_000 < (WATCH.parent / "pictures" / name).stat().st_size < SMALL_PICTURE


def test_pictures_of_runs_that_logged_nothing_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "docs/studies"))
    (tmp_path / "half").mkdir()
    (tmp_path / "half/metrics.csv").write_text("step,train_loss\n1,2.5\n")
    study = importlib.import_module("health_pictures")
    assert study.main([str(tmp_path / "half"), str(tmp_path / "none"), str(tmp_path / "made")]) == 2
    assert [line[:5] for line in capsys.readouterr().err.splitlines()] == ["error", "  fix"] * 2
    assert not (tmp_path / "made").exists()

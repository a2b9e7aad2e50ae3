"""The scripts beside the package, `benchmarks/`: each once, on a CPU, as small as it goes."""

import importlib
import json
import re
from pathlib import Path

import pytest

from gpt2_fp8.compose import preflight
from tests.runs import SMALL, train

pytestmark = pytest.mark.whole
SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"
FP8 = ["precision=fp8_hybrid", "precision.backend=emulated", "recipe=delayed"]


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def test_the_model_of_scale_is_what_was_measured_and_what_its_page_shows(script, capsys):
    scale = script("scale")
    for row in scale.MEASURED:
        assert row.predict() == pytest.approx(row.speed, rel=0.05)
    scale.main()
    page = (SCRIPTS.parent / "docs/scale.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith(("| GPT", "| Llama"))]
    assert capsys.readouterr().out.splitlines() == shown


def test_other_programs(script):
    (config,) = preflight([*SMALL, "precision=bf16"])
    row = script("peers").measure("plain torch", config, steps=2, warmup=1)
    assert 0 < row["slowest"] <= row["tokens/s"] <= row["fastest"]
    assert row["loss"] == pytest.approx(5.55, abs=0.5)  # ln 257: the ids are random


def test_power(script, capsys):
    assert script("power").main(["--seconds", "0.1", "--warmup", "1", "--", *SMALL, "precision=fp32"]) == 0
    assert "tokens/s, the median of" in capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_time_of_an_update(script, capsys, optimizer):
    words = ["--repeats", "1", "--", *SMALL, "precision=fp32", f"optimizer={optimizer}"]
    assert script("update_time").main(words) == 0
    assert re.fullmatch(r"\S+ update: \d+\.\d\d ms\n", capsys.readouterr().out)


def test_the_error_of_gradients(script, tmp_path, capsys):
    """A condition equal to the first has none."""
    train(tmp_path / "run", *FP8)
    Path("rows.txt").write_text(f"fp32: precision=fp32\nagain: precision=fp32\nFP8: {' '.join(FP8)}\n")
    asked = ["run", "--conditions", "rows.txt", "--batches", "2", "--", *SMALL]
    assert script("gradient_bias").main(asked) == 0
    again, fp8 = capsys.readouterr().out.strip().split("\n\n")
    assert again.splitlines()[2].split()[1:] == ["0.0000", "0.0000", "0.0000", "1.0000"]
    assert 0 < float(fp8.splitlines()[2].split()[1]) < 0.3


@pytest.mark.slow
def test_what_fp8_costs(script, capsys):
    """One run, which changes its precision after step 3; the same command trains nothing more."""
    Path("rows.txt").write_text(f"fp32: precision=fp32 @3 {' '.join(FP8)}\n")
    words = [*SMALL, "trainer.max_steps=5", "trainer.val_check_interval=5"]
    asked = ["study", "--conditions", "rows.txt", "--seeds", "1", "--", *words]
    for _ in range(2):
        assert script("fp8_gap").main(asked) == 0
        assert "fp32          1  5." in capsys.readouterr().out
    found = json.loads(Path("study/fp32/seed-1/summary.json").read_text())
    assert (found["steps"], found["precision"]["ran"]) == (5, "fp8_hybrid")


def test_pictures(script, tmp_path):
    pytest.importorskip("matplotlib")
    train(tmp_path / "run", *FP8, "callbacks.fp8_health=true", "callbacks.fp8_health_every_n_steps=2")
    assert script("health_pictures").main(["run", "run", "made"]) == 0
    for name in ("a", "b"):
        rows = "".join(f"{step},{step * 65536},{11 - step / 100}\n" for step in range(1, 60))
        Path(f"{name}.csv").write_text(f"step,tokens,train_loss\n{rows}")
    assert script("readme_pictures").main(["made", "--bf16", "a.csv", "--fp8", "b.csv"]) == 0
    pictures = {"health_summaries.png", "health_layers.png", "loss.png", "speed.png"}
    assert {path.name for path in Path("made").iterdir()} == pictures

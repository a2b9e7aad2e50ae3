"""The scripts beside the package, `benchmarks/`: each once, on a CPU, as small as it goes."""

import importlib
import json
import math
import re
from pathlib import Path
from threading import Event

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


@pytest.mark.slow
def test_the_share_of_speed_that_is_left(script, capsys):
    """Runs leave nothing saved, and none behind: they end after the last row."""
    words = [word for word in SMALL[1:] if "checkpoint" not in word]
    words += ["precision=fp32", "trainer.accelerator=cpu", "data.val_sequences=0"]
    assert script("several_gpus").main(["runs", "--gpus", "0", "1", "--steps", "6", "--", *words]) == 0
    rate = r"(\d[\d,]*) tokens/s"
    alone, together = capsys.readouterr().out.splitlines()
    assert re.fullmatch(f"slowest of 2 GPUs alone: {rate}", alone)
    found = re.fullmatch(rf"together: {rate} \(.*\), (\S+)%; first row after \d+ s", together)
    count = [int(text.replace(",", "")) for text in (found[1], re.search(rate, alone)[1])]
    assert float(found[2]) == pytest.approx(100 * count[0] / count[1] / 2, abs=0.1)
    last = Path("runs/together/metrics.csv").read_text().splitlines()[-1]
    assert 6 <= int(last.partition(",")[0]) <= 8
    assert not list(Path("runs").rglob("manifest.json"))


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


def test_an_interrupted_study_has_not_failed(script, capsys, monkeypatch):
    """One of two runs ends as those that are told to stop, after the interruption."""
    gap, stopped = script("fp8_gap"), Event()

    def process(self, job, gpu):
        if job.seed == 1:
            raise KeyboardInterrupt
        stopped.wait()
        return 143

    class Run:
        terminate = stopped.set

    jobs = [gap.Job(Path("study"), "a", seed, (), (gap.Leg(()),), 5) for seed in (1, 2)]
    monkeypatch.setattr(gap.Queue, "_process", process)
    runs = gap.Queue([], 2)
    runs._running.add(Run())
    with pytest.raises(KeyboardInterrupt):
        runs.run(jobs)
    assert capsys.readouterr().out == ""


def test_the_time_to_a_loss_is_asked_of_no_study(script, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        script("time_to_loss").main([str(tmp_path)])
    assert f"{tmp_path} is no folder of fp8_gap.py" in capsys.readouterr().err


def test_the_time_to_a_loss(script, tmp_path, capsys):
    """Losses that fall with log tokens; one method needs half the tokens, and the horizons of another are too short."""
    curves = {"bf16": 1.0, "muon": 0.5, "short": 0.5, "one": 0.5}
    horizons = {"bf16 @ whole": 100, "muon @ a": 40, "muon @ b": 60, "short @ a": 10, "short @ b": 20, "one @ a": 40}
    study = {"conditions": {name: [] for name in horizons}}
    (tmp_path / "study.json").write_text(json.dumps(study))
    for name, millions in horizons.items():
        for seed, luck in ((1, 0.01), (2, -0.01)):
            tokens = millions * 1_000_000
            loss = 8 - 0.25 * math.log(tokens / curves[name.partition(" ")[0]]) + luck
            folder = tmp_path / name.replace(" @ ", "_").replace(" ", "_") / f"seed-{seed}"
            folder.mkdir(parents=True)
            found = {"status": "completed", "tokens": tokens, "last_val_loss": loss}
            (folder / "summary.json").write_text(json.dumps(found))
    script("time_to_loss").main([str(tmp_path), "--speeds", "bf16=1e6", "muon=2e6"])
    goal, _, _, of_bf16, of_muon, of_short, of_one = capsys.readouterr().out.splitlines()
    assert goal == f"L* = {8 - 0.25 * math.log(1e8):.4f} (0.0100), of bf16"
    assert of_bf16 == "| bf16 | 2 | 100.0 (0.0) | 100.0 | 1.000 (0.000) |"
    # exp of the mean of two that luck moves by 0.01 / 0.25 of log tokens, and L* by as much
    assert of_muon == f"| muon | 2 | 50.0 ({50 * math.hypot(0.04, 0.04):.1f}) | 25.0 | 0.250 (0.014) |"
    assert "do not bracket" in of_short
    assert of_one == "| one | | two horizons bracket L*, and it has 1 | | |"
    for lost in (tmp_path / "muon_a/seed-1", tmp_path / "muon_b/seed-2"):
        (lost / "summary.json").unlink()
    assert script("time_to_loss").main([str(tmp_path)]) == 1
    assert "| muon | | no seed has finished at both of its horizons | | |" in capsys.readouterr().out
    for of_first in (["muon @ a", "muon @ b"], ["nothing @ whole"]):
        (tmp_path / "study.json").write_text(json.dumps({"conditions": dict.fromkeys(of_first)}))
        with pytest.raises(SystemExit, match="2"):
            script("time_to_loss").main([str(tmp_path)])
        assert "needs finished runs of one horizon" in capsys.readouterr().err


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

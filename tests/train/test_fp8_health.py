"""FP8's health in whole runs on a CPU: it is in the logs, it changes nothing, and it says what is wrong."""

import csv

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt2_fp8.engine import training_step
from tests.runs import assert_same_checkpoint, checkpoint, metrics, recorded, train, train_until

pytestmark = pytest.mark.whole
FP8 = ["precision.backend=emulated", "callbacks.fp8_health_every_n_steps=3"]
OFF = ["callbacks.fp8_health=false", "callbacks.red_flags=false"]


@pytest.fixture(autouse=True)
def _at_the_interval_that_is_asked_for(monkeypatch):
    """A pass of a few milliseconds beside steps of a few milliseconds would be made less often."""
    monkeypatch.setattr("gpt2_fp8.callbacks.fp8_health.COST", 1e9)


def rows(folder):
    with (folder / "fp8.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def steps(folder):
    return sorted({int(row["step"]) for row in rows(folder)})


@pytest.mark.parametrize(
    "words",
    [["model.dropout=0.1"], ["recipe=current"], ["recipe=block", "activation_checkpointing=full"]],
    ids=" ".join,
)
def test_losses_weights_and_scales_are_those_of_a_run_without_it(tmp_path, words):
    on, log = recorded(tmp_path / "on", *FP8, *words)
    off, without = recorded(tmp_path / "off", *FP8, *words, *OFF)
    assert on == off
    assert_same_checkpoint(checkpoint(tmp_path / "on", 12), checkpoint(tmp_path / "off", 12))
    assert log["val_loss"] == without["val_loss"]
    assert not (tmp_path / "off/fp8.csv").exists()
    assert not any(name.startswith("fp8/") for name in without)
    assert steps(tmp_path / "on") == [1, 3, 6, 9, 12]
    every = [1, 3, 6, 9, 12] if "recipe" in words[0] else list(range(1, 13))
    assert list(log["fp8/headroom_gradient"]) == every
    assert list(log["fp8/flushed_gradient"]) == [1, 3, 6, 9, 12]
    assert len(rows(tmp_path / "on")) == 5 * 3 * 4


def test_each_step_is_there_once_after_a_kill_and_a_resume(tmp_path):
    train(tmp_path / "whole", *FP8)
    train_until(7, tmp_path / "legs", *FP8)
    train(tmp_path / "legs", *FP8, "ckpt_path=last")
    assert steps(tmp_path / "legs") == [1, 3, 6, 9, 12]
    ours, expected = rows(tmp_path / "legs"), rows(tmp_path / "whole")
    resumed = {"6"}  # the first reading after a resume has none before it to compare with
    for row in [*ours, *expected]:
        if row["step"] in resumed:
            del row["jump"]
    assert ours == expected
    assert metrics(tmp_path / "legs")["fp8/scale_age"] == metrics(tmp_path / "whole")["fp8/scale_age"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        [*FP8, "precision.keep_bf16=['blocks.*']"],
    ],
    ids=lambda words: " ".join(words[2:]) or "fallback",
)
def test_a_run_that_casts_nothing_says_nothing_of_it(tmp_path, caplog, words):
    train(tmp_path, *words, "trainer.max_steps=3", "trainer.val_check_interval=3")
    assert [message for message in caplog.messages if "health" in message] == []
    assert not (tmp_path / "fp8.csv").exists()
    assert not any(name.startswith("fp8/") for name in metrics(tmp_path))


def test_without_a_csv_log_there_is_no_table(tmp_path):
    few = ["trainer.max_steps=3", "trainer.val_check_interval=3"]
    train(tmp_path, *FP8, *few, "logger=tensorboard")
    assert not list(tmp_path.glob("*.csv"))


def test_tensorboard_has_the_scale_of_every_layer_at_the_steps_of_the_table(tmp_path):
    train(tmp_path, *FP8, "trainer.max_steps=6", "trainer.val_check_interval=6")
    curves = EventAccumulator(str(tmp_path / "tensorboard/train")).Reload()
    shown, tensors = {}, {}
    for tag in curves.Tags()["scalars"]:
        if tag.startswith("precision_fp8_layers/"):
            shown[tag] = {point.step: pytest.approx(point.value) for point in curves.Scalars(tag)}
    for row in rows(tmp_path):
        for figure in ("scale", "amax"):
            tag = f"precision_fp8_layers/{figure}_{row['tensor']}/{row['layer']}"
            tensors.setdefault(tag, {})[int(row["step"])] = float(row[figure])
    assert shown == tensors
    assert len(shown) == 2 * 3 * 4, "scale and amax of three operands of four layers"
    assert {tuple(points) for points in shown.values()} == {(1, 3, 6)}


def test_a_sick_run_says_so_once_and_its_remedy_helps(tmp_path, caplog):
    sick = [*FP8, "recipe=delayed", "recipe.margin=16", "optim.lr=1e-4"]
    train(tmp_path / "sick", *sick)
    said = [message for message in caplog.messages if "FP8:" in message]
    assert len([line for line in said if "becomes 0" in line]) == 1, said
    remedy = said[0].split("; ")[1].partition(" leaves ")[0].split()
    assert max(metrics(tmp_path / "sick")["fp8/flushed_input"].values()) > 0.25
    caplog.clear()
    train(tmp_path / "better", *[word for word in sick if "recipe" not in word], *remedy)
    assert [message for message in caplog.messages if "FP8:" in message] == []
    train(tmp_path / "quiet", *sick, "callbacks.red_flags=false")
    assert [message for message in caplog.messages if "FP8:" in message] == []


def test_where_a_pass_takes_long_it_is_made_less_often(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("gpt2_fp8.callbacks.fp8_health.COST", 1e-9)
    caplog.set_level("INFO")
    train(tmp_path, *FP8)
    assert steps(tmp_path) == [1, 3, 12], "the first is not judged, the second is, and there is one at the end"
    assert any("a sampled pass over the FP8 tensors takes" in message for message in caplog.messages)


def test_without_memory_the_run_goes_on(tmp_path, monkeypatch, caplog):
    from gpt2_fp8.fp8.sampled_pass import SampledPass

    def full(*_):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(SampledPass, "_go", full)
    train(tmp_path, *FP8)
    assert not (tmp_path / "fp8.csv").exists()
    assert len([message for message in caplog.messages if "no memory for a sampled pass" in message]) == 1
    assert len(metrics(tmp_path)["fp8/scale_input"]) == 12


@pytest.mark.parametrize(
    ("broken", "late"),
    [
        ("fp8.sampled_pass.SampledPass._go", False),
        ("fp8.stored_scales.StoredScales.send", True),
        ("fp8.stored_scales.StoredScales.received", False),
        ("fp8.stored_scales.StoredScales.received", True),
    ],
)
def test_an_error_in_looking_does_not_end_a_run(tmp_path, monkeypatch, caplog, broken, late):
    """Nor does it change the run, wherever it is settled: `late` as on a GPU."""
    monkeypatch.setattr(training_step, "COMPUTES_MEANWHILE", ["cpu"] if late else [])

    def fail(*_):
        raise AssertionError("of a library")

    off, _ = recorded(tmp_path / "off", *FP8, *OFF)
    monkeypatch.setattr(f"gpt2_fp8.{broken}", fail)
    on, _ = recorded(tmp_path / "on", *FP8)
    assert on == off
    assert_same_checkpoint(checkpoint(tmp_path / "on", 12), checkpoint(tmp_path / "off", 12))
    said = [message for message in caplog.messages if "FP8's health is not watched" in message]
    assert said == ["step 1: FP8's health is not watched from here on (AssertionError: of a library); training goes on"]

"""FP8's health in whole runs on a CPU: it is in the logs, it changes nothing, and it says what is wrong."""

import csv

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt2_fp8.engine import training_step
from gpt2_fp8.engine.fp8_health import FP8Health
from tests.runs import assert_same_checkpoint, checkpoint, metrics, recorded, train, train_until

pytestmark = pytest.mark.whole
FP8 = ["precision.backend=emulated", "callbacks.fp8_health_every_n_steps=3"]
OFF = ["callbacks.fp8_health=false", "callbacks.red_flags=false"]


def rows(folder):
    with (folder / "fp8.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def steps(folder):
    return sorted({int(row["step"]) for row in rows(folder)})


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


def test_a_run_that_casts_nothing_says_nothing_of_it(tmp_path, caplog):
    few = ["trainer.max_steps=3", "trainer.val_check_interval=3"]
    train(tmp_path, *FP8, "precision.keep_bf16=['blocks.*']", *few)
    assert [message for message in caplog.messages if "health" in message] == []
    assert not (tmp_path / "fp8.csv").exists()
    assert not any(name.startswith("fp8/") for name in metrics(tmp_path))


def test_tensorboard_has_the_scale_of_every_layer_at_the_steps_of_the_table(tmp_path):
    train(tmp_path, *FP8, "trainer.max_steps=6", "trainer.val_check_interval=6")
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
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


def test_a_sick_run_says_so_once_unless_it_is_told_not_to(tmp_path, caplog):
    sick = [*FP8, "recipe=delayed", "recipe.margin=16", "optim.lr=1e-4"]
    for more, times in ([], 1), (["callbacks.red_flags=false"], 0):
        caplog.clear()
        train(tmp_path / str(times), *sick, *more)
        assert sum("FP8:" in line and "becomes 0" in line for line in caplog.messages) == times
        assert max(metrics(tmp_path / str(times))["fp8/flushed_input"].values()) > 0.25


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    folder = tmp_path_factory.mktemp("off") / "run"
    return recorded(folder, FP8[0], *OFF)[0], folder


@pytest.mark.parametrize(
    ("broken", "late"),
    [(None, False), ("fp8.sampled_pass.SampledPass._go", False), ("fp8.fp8_tensors.StoredScales.receive", True)],
)
def test_looking_changes_nothing_and_an_error_in_it_does_not_end_a_run(
    tmp_path, without, monkeypatch, caplog, broken, late
):
    """Wherever it is settled: `late` as on a GPU."""
    monkeypatch.setattr(training_step, "COMPUTES_MEANWHILE", ["cpu"] if late else [])

    def fail(*_):
        raise AssertionError("of a library")

    off, folder = without
    if broken:
        monkeypatch.setattr(f"gpt2_fp8.{broken}", fail)
    on, _ = recorded(tmp_path / "on", *FP8)
    assert on == off
    assert_same_checkpoint(checkpoint(tmp_path / "on", 12), checkpoint(folder, 12))
    assert len([message for message in caplog.messages if "AssertionError: of a library" in message]) == bool(broken)


@pytest.mark.parametrize("late", [False, True])
def test_between_intervals_nothing_is_read_and_only_a_sampled_pass_waits(tmp_path, monkeypatch, late):
    """`late`: as on a GPU, where what a step leaves is read while the next one is computed."""
    monkeypatch.setattr(training_step, "COMPUTES_MEANWHILE", ["cpu"] if late else [])
    sent_before, own = [], FP8Health.read

    def read(self, sent=None):
        sent_before.append(sent is not None)
        return own(self, sent)

    monkeypatch.setattr(FP8Health, "read", read)
    words = ["trainer.log_every_n_steps=2", "callbacks.fp8_health_every_n_steps=6", "trainer.max_steps=11"]
    train(tmp_path, *FP8, *words, "precision.bf16_last_steps=1", "trainer.val_check_interval=11")
    assert list(metrics(tmp_path)["fp8/scale_weight"]) == [1, 2, 4, 6, 8, 10]
    assert steps(tmp_path) == [1, 6, 10]
    assert sent_before == [False, late, late, False, late, False]

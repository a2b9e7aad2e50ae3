"""The training log's interval: when its row is written, and that it is the same whenever that is."""

import csv
import math
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest

from gpt2_fp8.callbacks.throughput import Throughput
from gpt2_fp8.data.lane import Batches
from gpt2_fp8.engine import training_step
from gpt2_fp8.engine.attempts import Attempts
from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.scaling import FP8Scaling
from gpt2_fp8.runtime.moments import GapClock
from gpt2_fp8.train.fit import Training
from gpt2_fp8.train.module import GPT2Module
from tests.runs import EMULATED_FP8, metrics, train, train_until

OF_THE_CLOCK = {"tokens_per_second", "step_time", "data_wait", "memory_gb", "process_memory_gb"}


@pytest.fixture
def late(monkeypatch):
    """As on a GPU, where a step is settled while the next one is computed."""
    monkeypatch.setattr(training_step, "COMPUTES_MEANWHILE", ["cpu"])


def rows_and_attempts(folder, monkeypatch, *words):
    """Train; return how many steps had been attempted when the row of a step was written."""
    attempts, asked = [], {}
    made, log = Attempts.make, Throughput._log

    def recorded(self, *arguments, **keys):
        attempts.append(arguments)
        return made(self, *arguments, **keys)

    def logged(self, trainer, *of):
        asked[trainer.global_step] = len(attempts)
        log(self, trainer, *of)

    monkeypatch.setattr(Attempts, "make", recorded)
    monkeypatch.setattr(Throughput, "_log", logged)
    train(folder, "trainer.log_every_n_steps=3", "callbacks.checkpoint_every_n_steps=0", *words)
    assert list(metrics(folder)["train_loss"]) == list(asked)
    return asked


def test_a_row_is_written_while_the_gpu_computes_the_next_step(tmp_path, monkeypatch, late):
    """But at once for the first step, before a validation, and at the end."""
    words = ["trainer.val_check_interval=6", "trainer.max_steps=11"]
    assert rows_and_attempts(tmp_path, monkeypatch, *words) == {1: 1, 3: 4, 6: 6, 9: 10, 11: 11}


def test_a_row_is_written_at_once_where_the_next_step_would_have_to_be_computed_first(tmp_path, monkeypatch):
    assert rows_and_attempts(tmp_path, monkeypatch) == {1: 1, 3: 3, 6: 6, 9: 9, 12: 12}


@pytest.fixture
def accidents(monkeypatch):
    """A gradient of step 3 that is not finite in FP8, and an amax that jumps in step 6."""
    make = Attempts.make

    def spoiled(self, ids, done, **how):
        attempt = make(self, ids, done, **how)
        model = self._gradients.model
        if done == 2:
            model.tokens.weight.grad[0, 0] = math.nan
        if done == 5:
            for layer in state.scaling_states(model):
                layer.amax_history[0] = 1e30
            attempt = attempt._replace(amax_outliers=self.scaling.count_amax_outliers(self.parts))
        return attempt

    monkeypatch.setattr(Attempts, "make", spoiled)


def table(path):
    with path.open() as file:
        return [{key: value for key, value in row.items() if key not in OF_THE_CLOCK} for row in csv.DictReader(file)]


def test_rows_are_the_same_whenever_they_are_written(tmp_path, monkeypatch, accidents, request):
    limited, limit = [], FP8Scaling.limit
    monkeypatch.setattr(FP8Scaling, "limit", lambda self, parts: limited.append(parts) or limit(self, parts))
    words = [*EMULATED_FP8, "trainer.log_every_n_steps=2", "callbacks.fp8_health_every_n_steps=5"]
    train(tmp_path / "at once", *words)
    request.getfixturevalue("late")
    train(tmp_path / "late", *words)
    for name in ("metrics.csv", "fp8.csv"):
        found, expected = (table(tmp_path / folder / name) for folder in ("late", "at once"))
        assert found == expected
    assert limited == [2, 2], "once a run"
    assert metrics(tmp_path / "late")["bf16_reruns"][4] == 1
    assert list(metrics(tmp_path / "late")["fp8/scale_input"]) == [1, 2, 4, 6, 8, 10, 12]


def test_an_interval_and_the_counts_go_on_after_a_resume(tmp_path, accidents):
    """The resumed process has a row for its first step, 5, whose loss is the mean of steps 4 and 5."""
    words = [
        *EMULATED_FP8,
        "trainer.log_every_n_steps=3",
        "callbacks.fp8_health_every_n_steps=4",
        "trainer.val_check_interval=12",
    ]
    train(tmp_path / "clean", *words)
    train_until(5, tmp_path / "run", *words)
    train(tmp_path / "run", *words, "ckpt_path=last")
    clean, found = metrics(tmp_path / "clean"), metrics(tmp_path / "run")
    losses = found["train_loss"]
    assert (2 * losses.pop(5) + losses[6]) / 3 == pytest.approx(clean["train_loss"].pop(6), rel=1e-6)
    assert losses.pop(6)
    assert losses == clean["train_loss"]
    assert found["bf16_reruns"] == {1: 0, 3: 1, 5: 1, 6: 1, 9: 1, 12: 1}
    sampled = [{row["step"] for row in table(tmp_path / name / "fp8.csv")} for name in ("clean", "run")]
    assert sampled == [{"1", "6", "9", "12"}] * 2


@pytest.mark.parametrize(("gap", "waits"), [(60.0, True), (0.0, False)])
def test_what_the_gpu_computes_meanwhile_is_no_waiting_for_data(tmp_path, monkeypatch, gap, waits):
    """`gap`: how long it had nothing to do before a step."""
    monkeypatch.setattr(GapClock, "step_begins", lambda *_: SimpleNamespace(seconds=lambda: gap))
    train(tmp_path, "trainer.max_steps=4", "trainer.val_check_interval=4")
    found = metrics(tmp_path)["data_wait"]
    assert list(found) == [2, 3, 4]
    assert all((0 < wait < 1) == waits for wait in found.values())


class Read(pl.Callback):
    """Notes what callbacks have of a row after a step and after its validation; ends the run after `last` steps."""

    def __init__(self, last=math.inf):
        self.seen, self.last = [], last

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.last:
            raise ArithmeticError

    def on_train_batch_end(self, trainer, *_):
        self.seen.append((trainer.global_step, trainer.callback_metrics.get("train_loss")))

    def on_validation_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self.seen.append((f"validated {trainer.global_step}", trainer.callback_metrics["train_loss"]))


@pytest.fixture
def train_with(tmp_path, monkeypatch):
    def run(callback, *words):
        chosen = Training._choose
        monkeypatch.setattr(Training, "_choose", lambda *of: [*chosen(*of), callback])
        train(tmp_path, *words)
        return callback

    return run


def test_callbacks_have_a_row_a_step_late_but_at_once_where_it_is_validated(tmp_path, train_with, late):
    seen = train_with(Read(), "trainer.max_steps=8", "trainer.val_check_interval=4").seen
    loss = metrics(tmp_path)["train_loss"]
    of = {1: 1, 2: 1, 3: 2, 4: 4, "validated 4": 4, 5: 4, 6: 5, 7: 6, 8: 8, "validated 8": 8}
    assert seen == [(when, pytest.approx(loss[step])) for when, step in of.items()]


@pytest.mark.parametrize("words", [[], EMULATED_FP8], ids=["bf16", "fp8"])
def test_the_last_row_is_there_if_the_run_ends_by_an_error(tmp_path, train_with, late, words):
    often = ["trainer.log_every_n_steps=3", "callbacks.checkpoint_every_n_steps=0", "trainer.val_check_interval=12"]
    with pytest.raises(ArithmeticError):
        train_with(Read(last=6), *words, *often)
    table = metrics(tmp_path)
    for column in ("train_loss", *(["fp8/scale_input"] if words else [])):
        assert list(table[column]) == [1, 3, 6]


@pytest.mark.parametrize("meanwhile", [[], ["cpu"]], ids=["at once", "late"])
def test_an_interval_has_the_time_of_its_own_steps(tmp_path, monkeypatch, meanwhile):
    """Only batches take time here, a second each, and validations, whose time does not count."""
    monkeypatch.setattr(training_step, "COMPUTES_MEANWHILE", meanwhile)
    clock, made, validated = SimpleNamespace(now=0.0), Batches.next, GPT2Module.validation_step

    def batch(self):
        clock.now += 1.0
        return made(self)

    def validation(self, *arguments):
        clock.now += 50.0
        return validated(self, *arguments)

    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(Batches, "next", batch)
    monkeypatch.setattr(GPT2Module, "validation_step", validation)
    train(tmp_path, "trainer.log_every_n_steps=3", "trainer.val_check_interval=4", "trainer.max_steps=10")
    for column in ("step_time", "data_wait"):
        assert metrics(tmp_path)[column] == {3: 1.0, 6: 1.0, 9: 1.0, 10: 1.0}

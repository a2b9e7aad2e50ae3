"""W&B and MLflow with their real libraries, on this machine alone; and what happens when they do not answer."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.config import checks
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.train import services
from gpt2_fp8.train.services import Remote
from tests.runs import SMALL, metrics, record_steps, recorded, train, train_until

FEW = ["trainer.max_steps=6", "trainer.val_check_interval=3"]


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SERVICE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_")) and name not in before]:
        del os.environ[name]  # both libraries leave variables for their own child processes


def records_of(path):
    """The records of a file of W&B's: its header of 7 bytes, then LevelDB's log of blocks of 32 KiB."""
    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def legs_of(folder):
    """W&B's own files of a run, parsed: a list of records for each leg, in the legs' order."""
    from wandb.proto import wandb_internal_pb2

    return [
        [wandb_internal_pb2.Record.FromString(data) for data in records_of(path)]
        for path in sorted(folder.glob("wandb/*run-*/run-*.wandb"))
    ]


def rows_of(folder):
    return [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for leg in legs_of(folder)
        for record in leg
        if record.history.item
    ]


def test_they_have_each_row_a_resumed_run_is_the_same_and_losses_are_as_without(tmp_path, caplog):
    from mlflow.tracking import MlflowClient

    caplog.set_level("INFO", "gpt2_fp8")
    alone = recorded(tmp_path / "alone", *FEW, "logger=csv")
    folder, uri = tmp_path / "run", f"sqlite:///{tmp_path}/store.db"
    words = [*FEW, "logger=[default,wandb,mlflow]", f"logger.mlflow.tracking_uri='{uri}'", "+tags.round=2"]
    words += ["callbacks.checkpoint_every_n_steps=2", "logger.histograms_every_n_steps=1"]
    with pytest.MonkeyPatch.context() as patch:
        steps = record_steps(patch)
        train_until(4, folder, *words)
        assert f"mlflow ui --backend-store-uri {uri}" in caplog.text
        first = [services.read_run_id(folder, name) for name in ("wandb", "mlflow")]
        train(folder, *words, "ckpt_path=last")
    assert [services.read_run_id(folder, name) for name in ("wandb", "mlflow")] == first
    assert (steps, metrics(folder)["val_loss"]) == (alone[0], alone[1]["val_loss"])
    losses = pytest.approx(metrics(folder)["train_loss"])

    identifiers = [{record.run.run_id for record in leg if record.run.run_id} for leg in legs_of(folder)]
    assert identifiers == [{first[0]}, {first[0]}], "folders of two legs of one second would differ by a number"
    assert {
        int(r["trainer/global_step"]): float(r["train_loss"]) for r in rows_of(folder) if "train_loss" in r
    } == losses

    client = MlflowClient(uri)
    (experiment,) = [found for found in client.search_experiments() if found.name == "gpt2-fp8"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status) == (first[1], "FINISHED")
    assert (run.data.params["model/n_layer"], run.data.tags["tags.round"]) == ("1", "2")
    assert {row.step: row.value for row in client.get_metric_history(first[1], "train_loss")} == losses


class Away(Remote):
    """A service that does not answer, or answers with an error."""

    name, undelivered = "W&B", "it is lost"

    def __init__(self, begin):
        super().__init__(compose.preflight(["run_name=x"])[0], Path("x"), in_sweep=False, resumed=False)
        self.begin = begin


def test_an_outage_costs_a_warning_and_not_the_run(caplog):
    def refused():
        raise ConnectionError("no route to host")

    logger = Away(refused)
    for step in range(5):
        logger.log_metrics({"train_loss": 1.0}, step)
    logger.finalize("success")
    assert caplog.messages == ["W&B does not take a row, training goes on: no route to host"]


def test_a_run_whose_identifier_cannot_be_noted_is_begun_once(caplog):
    """Its folder is not there. Each row would begin another run."""
    begun, rows = [], []

    def begin():
        begun.append(1)
        logger.note_run_id("abc")
        return SimpleNamespace(log_metrics=lambda row, step: rows.append(step), finalize=lambda status: None)

    logger = Away(begin)
    for step in range(3):
        logger.log_metrics({"train_loss": 1.0}, step)
    logger.finalize("success")
    assert (len(begun), rows, logger.run_id) == (1, [0, 1, 2], "abc")
    (said,) = caplog.messages
    assert said.startswith("W&B: a resume will begin another run, since this one's identifier cannot be noted: ")


def test_a_service_that_hangs_holds_nothing_up(monkeypatch, caplog):
    monkeypatch.setattr(services, "END_SECONDS", 0.2)
    monkeypatch.setattr(services, "MOST_WAITING", 3)
    answers = threading.Event()
    logger = Away(answers.wait)
    for step in range(20):
        logger.log_metrics({"train_loss": 1.0}, step)
    logger.finalize("success")
    assert all(sum(word in line for line in caplog.messages) == 1 for word in ("rows are lost", "it is lost"))
    answers.set()


def test_a_missing_library_is_said_before_torch(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda module: None if module == "mlflow" else object())
    (config,) = compose.preflight([*SMALL, "logger=none"])
    assert list(checks.check_logger(config)) == []
    with pytest.raises(UserError, match="library mlflow"):
        compose.preflight([*SMALL, "logger=mlflow"])

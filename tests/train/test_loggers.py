"""metrics.csv and TensorBoard over fresh starts, resumes and kills."""

import csv
import html
import math
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from gpt2_fp8.config.schema import LoggerConfig
from gpt2_fp8.train import metrics_csv
from gpt2_fp8.train.event_files import code_block
from gpt2_fp8.train.loggers import MetricsFile, build_loggers
from gpt2_fp8.train.tensorboard_tags import place, placed

BOTH = LoggerConfig(tensorboard=True, csv=True)


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    """Shorter names than a run's."""
    monkeypatch.setattr(metrics_csv, "COLUMNS", metrics_csv.COLUMNS | {"loss", "aa", "zz", "new"})


def log(logger, steps, **extra):
    for step in steps:
        logger.log_metrics({"loss": 1 / step, **extra}, step=step)
    logger.finalize("success")


def table(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_which_are_built(tmp_path):
    assert build_loggers(LoggerConfig(tensorboard=False, csv=False), tmp_path, None) == []
    tensorboard, table = build_loggers(BOTH, tmp_path, None)
    assert (tensorboard.log_dir.rstrip("/"), table.log_dir) == (str(tmp_path / "tensorboard"), str(tmp_path))
    assert list(tmp_path.iterdir()) == []  # nothing is touched before the first use


def test_resuming_keeps_the_rows_up_to_the_step(tmp_path):
    log(MetricsFile(tmp_path, None), range(1, 8), val_loss=2.5)
    log(MetricsFile(tmp_path, 4), range(5, 10))
    metrics_csv = table(tmp_path)
    assert [int(row["step"]) for row in metrics_csv] == list(range(1, 10))
    assert [float(row["loss"]) for row in metrics_csv] == [1 / step for step in range(1, 10)]
    assert [row["val_loss"] for row in metrics_csv] == ["2.5"] * 4 + [""] * 5


def test_a_fresh_start_replaces_what_is_there(tmp_path):
    log(MetricsFile(tmp_path, None), range(1, 8))
    log(MetricsFile(tmp_path, None), [1, 2])
    assert [row["step"] for row in table(tmp_path)] == ["1", "2"]


def test_resuming_before_the_first_row(tmp_path):
    log(MetricsFile(tmp_path, 3), [4])
    log(MetricsFile(tmp_path, 2), [3])
    assert [row["step"] for row in table(tmp_path)] == ["3"]


def test_new_columns_keep_the_old_rows(tmp_path):
    logger = MetricsFile(tmp_path, None)
    logger.log_metrics({"loss": torch.tensor(0.5)}, step=1)
    logger.log_metrics({"val_loss": 0.25, "aa": 1.0}, step=1)
    logger.log_metrics({"loss": 0.125}, step=2)
    assert table(tmp_path) == [
        {"step": "1", "loss": "0.5", "aa": "", "val_loss": ""},
        {"step": "1", "loss": "", "aa": "1.0", "val_loss": "0.25"},
        {"step": "2", "loss": "0.125", "aa": "", "val_loss": ""},
    ]
    log(MetricsFile(tmp_path, 2), [3], zz=9)
    assert [row["zz"] for row in table(tmp_path)] == ["", "", "", "9"]


@pytest.mark.parametrize("torn", ["3", "3,0.33", "x" * 5000, '"'])
def test_a_line_cut_by_a_kill_is_dropped(tmp_path, torn):
    log(MetricsFile(tmp_path, None), [1, 2])
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write(torn)
    log(MetricsFile(tmp_path, 5), [6])
    assert [row["step"] for row in table(tmp_path)] == ["1", "2", "6"]


def test_killed_while_rewriting_the_old_file_stays(tmp_path, monkeypatch):
    logger = MetricsFile(tmp_path, None)
    logger.log_metrics({"loss": 1.0}, step=1)
    before = (tmp_path / "metrics.csv").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        logger.log_metrics({"new": 1.0}, step=2)
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_tensorboard_shows_each_step_once(tmp_path):
    for resume_step, steps in [(None, range(1, 8)), (4, range(5, 10)), (9, range(10, 12))]:
        (logger,) = build_loggers(LoggerConfig(tensorboard=True, csv=False), tmp_path, resume_step)
        log(logger, steps)
        next_second()
    events = EventAccumulator(str(tmp_path / "tensorboard/train")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 12))


def next_second():
    """Wait for it. TensorBoard sorts files of one second by their number as text, so that 10 comes before 9."""
    began = int(time.time())
    while int(time.time()) == began:
        time.sleep(0.02)


def test_tensorboard_starts_afresh_without_a_checkpoint(tmp_path):
    for steps in (range(1, 8), range(1, 3)):
        (logger,) = build_loggers(LoggerConfig(tensorboard=True, csv=False), tmp_path, None)
        log(logger, steps)
        next_second()
    events = EventAccumulator(str(tmp_path / "tensorboard/train")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]


def test_a_validation_that_is_done_once_more_has_its_row_already(tmp_path):
    before = MetricsFile(tmp_path, None)
    log(before, range(1, 5))
    before.log_metrics({"val_loss": 2.5}, step=4)
    after = MetricsFile(tmp_path, 4)
    after.log_metrics({"val_loss": 2.5}, step=4)
    log(after, range(5, 7))
    assert [(row["step"], row["loss"], row["val_loss"]) for row in table(tmp_path)][3:] == [
        ("4", "0.25", ""), ("4", "", "2.5"), ("5", "0.2", ""), ("6", str(1 / 6), ""),
    ]  # fmt: skip
    again = MetricsFile(tmp_path, 3)  # of a step before it
    again.log_metrics({"val_loss": 2.25}, step=4)
    assert table(tmp_path)[-1]["val_loss"] == "2.25"


def curves(folder, name):
    return EventAccumulator(str(folder / "tensorboard" / name)).Reload()


def test_training_and_validation_share_a_chart(tmp_path):
    (logger,) = build_loggers(LoggerConfig(tensorboard=True, csv=False), tmp_path, None)
    logger.log_metrics({"train_loss": 2.0, "lr": 0.5, "tokens_per_second": 7.0, "fp8/scale_input": 3.0}, step=1)
    logger.log_metrics({"val_loss": torch.tensor(1.0), "val_loss/books": 4.0}, step=1)
    logger.finalize("success")
    train, val = curves(tmp_path, "train"), curves(tmp_path, "val")
    assert train.Scalars("loss")[0].value == 2.0
    assert val.Scalars("loss")[0].value == 1.0
    assert val.Scalars("loss/perplexity")[0].value == pytest.approx(math.e)
    assert val.Scalars("loss/books")[0].value == 4.0
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in sorted(train.Tags()["scalars"])))
    assert groups == ["loss", "optim", "precision_fp8", "speed"], "TensorBoard opens the first two"


def test_every_metric_of_a_run_has_a_group():
    alone = [name for name in metrics_csv.COLUMNS - {"step", "loss", "aa", "zz", "new"} if place(name)[1] == name]
    assert alone == []


def test_no_perplexity_of_a_loss_that_is_none():
    assert [tag for _, tag, _ in placed({"train_loss": math.nan})] == ["loss"]
    assert [tag for _, tag, _ in placed({"train_loss": math.inf})] == ["loss"]
    assert [tag for _, tag, _ in placed({"train_loss": 1000.0})] == ["loss"]


@pytest.mark.parametrize("text", ["a_b_c  *d*", "~~~\nx\n~~~~~", "<b>&</b>", "```", "  first"])
def test_a_text_is_shown_as_it_is(text):
    shown = markdown_to_safe_html(code_block(text))
    inside = html.unescape(shown.partition("<code>")[2].rpartition("</code>")[0])
    assert inside.rstrip("\n") == text


def test_a_resume_drops_what_is_late_in_each_curve(tmp_path):
    """Also of a run that validates once more only later."""
    for resume_step, last in ((None, 8), (4, 6)):
        (logger,) = build_loggers(LoggerConfig(tensorboard=True, csv=False), tmp_path, resume_step)
        for step in range((resume_step or 0) + 1, last + 1):
            logger.log_metrics({"train_loss": 1.0}, step=step)
        if resume_step is None:
            logger.log_metrics({"val_loss": 1.0}, step=3)
            logger.log_metrics({"val_loss": 1.0}, step=7)
        logger.finalize("success")
        next_second()
    assert [event.step for event in curves(tmp_path, "train").Scalars("loss")] == list(range(1, 7))
    assert [event.step for event in curves(tmp_path, "val").Scalars("loss")] == [3]

"""metrics.csv, fp8.csv and TensorBoard over fresh starts, resumes, kills and full disks."""

import csv
import time

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt2_fp8.config.schema import LoggerConfig
from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.fp8.fp8_tensors import FP8Tensor
from gpt2_fp8.train.loggers import FP8_COLUMNS, FP8File, MetricsFile, build_files

HEALTHS = [
    Health(FP8Tensor("blocks.0.qkv", "input", torch.float8_e4m3fn), 4.5, 99.5, 1e-9, 0.0, 2e-05, 3, -0.5),
    Health(FP8Tensor("head", "gradient", torch.float8_e5m2), 0.0, 1e20, float("inf"), 0.25, 0.5),
]


def log(logger, steps, **extra):
    for step in steps:
        logger.log_metrics({"train_loss": 1 / step, **extra}, step=step)
    logger.finalize("success")


def table(folder, name="metrics.csv"):
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def steps(folder):
    return [int(row["step"]) for row in table(folder)]


def test_a_resume_keeps_the_rows_up_to_its_step_and_a_fresh_start_none(tmp_path):
    log(MetricsFile(tmp_path, None), range(1, 8), val_loss=2.5)
    log(MetricsFile(tmp_path, 4), range(5, 10))
    rows = table(tmp_path)
    assert [float(row["train_loss"]) for row in rows] == [1 / step for step in range(1, 10)]
    assert [row["val_loss"] for row in rows] == ["2.5"] * 4 + [""] * 5
    log(MetricsFile(tmp_path, None), [3, 4])
    assert steps(tmp_path) == [3, 4]
    log(MetricsFile(tmp_path, 2), [3])
    assert steps(tmp_path) == [3]


def test_a_validation_that_is_done_once_more_has_its_row_already(tmp_path):
    before = MetricsFile(tmp_path, None)
    log(before, range(1, 5))
    before.log_metrics({"val_loss": 2.5}, step=4)
    after = MetricsFile(tmp_path, 4)
    after.log_metrics({"val_loss": 2.5}, step=4)
    log(after, [5])
    found = [(row["step"], row["train_loss"], row["val_loss"]) for row in table(tmp_path)][3:]
    assert found == [("4", "0.25", ""), ("4", "", "2.5"), ("5", "0.2", "")]


def test_fp8_csv_has_a_row_a_tensor_and_is_continued_likewise(tmp_path):
    def write(numbers, resume=None):
        file = FP8File(tmp_path, resume)
        for step in numbers:
            file.write(step, HEALTHS)

    write([1, 10, 20, 30])
    with (tmp_path / "fp8.csv").open("a") as file:
        file.write("2,blocks.0.qkv,inp")
    write([30], resume=20)
    one, two, *others = table(tmp_path, "fp8.csv")
    assert list(one) == FP8_COLUMNS
    assert " ".join(one.values()) == "1 blocks.0.qkv input e4m3 4.5 99.5 1e-09 0.0 2e-05 3 -0.5"
    assert list(two.values()) == ["1", "head", "gradient", "e5m2", "0.0", "1e+20", "inf", "0.25", "0.5", "", ""]
    assert [row["step"] for row in others] == ["10", "10", "20", "20", "30", "30"]


def event_file(folder, resume_step):
    (logger,) = build_files(LoggerConfig(tensorboard=True, csv=False), folder, resume_step)
    return logger


def curves(folder, name):
    return EventAccumulator(str(folder / "tensorboard" / name)).Reload()


def test_tensorboard_shows_each_step_once(tmp_path):
    """In each curve, also of a run that validates once more only later; a start without a checkpoint begins anew."""
    for resume_step, numbers, shown in [(None, [1, 2, 3, 4, 5], 5), (3, [4, 5, 6], 6), (None, [1, 2], 2)]:
        logger = event_file(tmp_path, resume_step)
        if resume_step is None:
            logger.log_metrics({"val_loss": 1.0}, step=2)
            logger.log_metrics({"val_loss": 1.0}, step=5)
        log(logger, numbers)
        assert [event.step for event in curves(tmp_path, "train").Scalars("loss")] == list(range(1, shown + 1))
        assert [event.step for event in curves(tmp_path, "val").Scalars("loss")] == ([2] if resume_step else [2, 5])
        began = int(time.time())
        while shown > 2 and int(time.time()) == began:  # TensorBoard sorts files of one second by their number as text
            time.sleep(0.02)

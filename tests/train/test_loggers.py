"""metrics.csv, fp8.csv and TensorBoard over fresh starts, resumes, kills and full disks."""

import csv
import html
import math
import re
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import metadata

from gpt2_fp8.config import own_words
from gpt2_fp8.config.schema import LoggerConfig
from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.fp8.fp8_tensors import FP8Tensor
from gpt2_fp8.train.loggers import FP8_COLUMNS, FP8File, MetricsFile, build_files, code_block, is_known

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


# ---- metrics.csv and fp8.csv -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("torn", ["3,0.33", '"'])
def test_a_line_cut_by_a_kill_is_dropped(tmp_path, torn):
    log(MetricsFile(tmp_path, None), [1, 2])
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write(torn)
    log(MetricsFile(tmp_path, 5), [6])
    assert steps(tmp_path) == [1, 2, 6]


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


def test_without_room_a_warning_is_logged_once_and_rows_of_metrics_are_kept(tmp_path, monkeypatch, caplog):
    fp8, logger = FP8File(tmp_path, None), MetricsFile(tmp_path, None)

    def full(*_):
        raise OSError(28, "No space left on device")

    for step in (1, 2, 3, 4):
        with monkeypatch.context() as patch:
            if step in (2, 3):
                patch.setattr("gpt2_fp8.checkpoint.durable.append", full)
            fp8.write(step, HEALTHS)
            logger.log_metrics({"train_loss": 1.0}, step=step)
            if step == 3:
                with pytest.raises(OSError, match="No space"):
                    logger.flush()
    assert [message.partition(" is not written")[0] for message in caplog.messages] == ["fp8.csv", "metrics.csv"]
    assert [row["step"] for row in table(tmp_path, "fp8.csv")] == ["1", "1", "4", "4"]
    assert steps(tmp_path) == [1, 2, 3, 4]
    (tmp_path / "metrics.csv").unlink()
    logger.log_metrics({"train_loss": 1.0}, step=5)
    assert steps(tmp_path) == [5], "a file that is gone is begun again"


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def event_file(folder, resume_step):
    (logger,) = build_files(LoggerConfig(tensorboard=True, csv=False), folder, resume_step)
    return logger


def events(folder):
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_tensorboard_shows_each_step_once(tmp_path):
    """In each curve, also of a run that validates once more only later; a start without a checkpoint begins anew."""
    for resume_step, numbers, shown in [(None, [1, 2, 3, 4, 5], 5), (3, [4, 5, 6], 6), (None, [1, 2], 2)]:
        logger = event_file(tmp_path, resume_step)
        if resume_step is None:
            logger.log_metrics({"val_loss": 1.0}, step=2)
            logger.log_metrics({"val_loss": 1.0}, step=5)
        log(logger, numbers)
        found = events(tmp_path)
        assert [event.step for event in found.Scalars("loss/train")] == list(range(1, shown + 1))
        assert [event.step for event in found.Scalars("loss/val")] == ([2] if resume_step else [2, 5])
        began = int(time.time())
        while shown > 2 and int(time.time()) == began:  # TensorBoard sorts files of one second by their number as text
            time.sleep(0.02)


def test_a_run_is_one_row_that_opens_on_the_loss(tmp_path):
    logger = event_file(tmp_path, None)
    logger.log_metrics({"train_loss": 2.0, "lr": 0.5, "tokens_per_second": 7.0, "fp8/scale_input": 3.0}, step=1)
    logger.log_metrics({"val_loss": torch.tensor(1.0), "val_loss/books": 4.0}, step=1)
    logger.log_hyperparams({"seed": 1})
    logger.finalize("success")
    assert {path.parent for path in tmp_path.rglob("events.*")} == {tmp_path / "tensorboard"}
    found = events(tmp_path)
    tags = sorted(found.Tags()["scalars"])
    shown = {tag: found.Scalars(tag)[0].value for tag in tags}
    assert (shown["loss/train"], shown["loss/val"], shown["loss/val/books"]) == (2.0, 1.0, 4.0)
    assert shown["perplexity/val"] == pytest.approx(math.e)
    assert tags[0] == "loss/train"
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in tags))
    assert groups == ["loss", "optim", "perplexity", "precision_fp8", "speed"], "TensorBoard opens the first two"
    (layout,) = found.Tensors("custom_scalars__config__")
    both = Layout.FromString(layout.tensor_proto.string_val[0]).category[0].chart[0].multiline.tag
    assert [[tag for tag in tags if re.search(pattern, tag)] for pattern in both] == [["loss/train"], ["loss/val"]]
    assert is_known("val_loss/books")
    assert not is_known("weight_norm")


@pytest.mark.parametrize("text", ["  a_b_c  *d*", "~~~\nx\n~~~~~", "<b>&</b>```"])
def test_a_text_is_shown_as_it_is(text):
    shown = markdown_to_safe_html(code_block(text))
    inside = html.unescape(shown.partition("<code>")[2].rpartition("</code>")[0])
    assert inside.rstrip("\n") == text


def test_a_run_is_a_row_of_the_table_with_its_values_and_results(tmp_path):
    own_words.write_plan(tmp_path, [["seed=3", "compile=true"], ["seed=3", "compile=false"]])
    values = {"compile": True, "optim.lr": 1e-3, "precision": "bf16", "seed": 3}
    event_file(tmp_path / "0", None).log_hyperparams(values)
    found = events(tmp_path / "0")
    content = found.summary_metadata[metadata.SESSION_START_INFO_TAG].plugin_data.content
    started = metadata.parse_session_start_info_plugin_data(content).hparams
    assert {name: getattr(started[name], started[name].WhichOneof("kind")) for name in started} == values
    content = found.summary_metadata[metadata.EXPERIMENT_TAG].plugin_data.content
    experiment = metadata.parse_experiment_plugin_data(content)
    assert [column.name for column in experiment.hparam_infos if column.differs] == ["compile", "optim.lr", "seed"]
    assert [result.name.tag for result in experiment.metric_infos][:2] == ["loss/val", "loss/train"]

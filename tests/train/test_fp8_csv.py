"""fp8.csv over fresh starts, resumes and damage, as metrics.csv."""

import csv

import pytest
import torch

from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.precision.fp8_tensors import FP8Tensor
from gpt2_fp8.train.fp8_csv import COLUMNS, FP8File

ROWS = [
    Health(FP8Tensor("blocks.0.qkv", "input", torch.float8_e4m3fn), 4.5, 99.5, 1e-9, 0.0, 2e-05, 3, -0.5),
    Health(FP8Tensor("head", "gradient", torch.float8_e5m2), 0.0, 1e20, float("inf"), 0.25, 0.5),
]


def write(folder, steps, resume=None):
    file = FP8File(folder, resume)
    for step in steps:
        file.write(step, ROWS)


def table(folder):
    with (folder / "fp8.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def steps(folder):
    return [int(row["step"]) for row in table(folder)]


def test_a_row_a_tensor_and_empty_cells_for_what_is_not_known(tmp_path):
    write(tmp_path, [7])
    one, two = table(tmp_path)
    assert tuple(one) == COLUMNS
    assert " ".join(one.values()) == "7 blocks.0.qkv input e4m3 4.5 99.5 1e-09 0.0 2e-05 3 -0.5"
    assert list(two.values()) == ["7", "head", "gradient", "e5m2", "0.0", "1e+20", "inf", "0.25", "0.5", "", ""]


def test_resuming_keeps_the_rows_up_to_the_step(tmp_path):
    write(tmp_path, [1, 10, 20, 30])
    write(tmp_path, [30, 40], resume=20)
    assert steps(tmp_path) == [1, 1, 10, 10, 20, 20, 30, 30, 40, 40]
    write(tmp_path, [5])
    assert steps(tmp_path) == [5, 5], "a fresh start replaces it"
    write(tmp_path, [6], resume=2)
    assert steps(tmp_path) == [6, 6]


def test_a_line_cut_by_a_kill_is_dropped(tmp_path):
    write(tmp_path, [1])
    with (tmp_path / "fp8.csv").open("a") as file:
        file.write("2,blocks.0.qkv,inp")
    write(tmp_path, [3], resume=2)
    assert steps(tmp_path) == [1, 1, 3, 3]


@pytest.mark.parametrize("text", ["step,loss\r\n1,2\r\n", "nonsense\n", "step,layer,amax\r\n1,head,2.0\r\n"])
def test_a_file_of_another_kind_is_put_aside(tmp_path, text, caplog):
    (tmp_path / "fp8.csv").write_text(text, newline="")
    write(tmp_path, [3], resume=2)
    assert steps(tmp_path) == [3, 3]
    assert (tmp_path / "fp8.csv.aside-1").read_text() in (text, text.replace("\r\n", "\n")) or "head" in text


def test_without_room_a_warning_is_logged_once_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    file = FP8File(tmp_path, None)
    file.write(1, ROWS)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gpt2_fp8.checkpoint.durable.append", full)
        file.write(2, ROWS)
        file.write(3, ROWS)
    file.write(4, ROWS)
    assert [message for message in caplog.messages if "fp8.csv is not written" in message] == [caplog.messages[0]]
    assert steps(tmp_path) == [1, 1, 4, 4]


def test_a_file_that_is_gone_is_begun_again(tmp_path):
    file = FP8File(tmp_path, None)
    file.write(1, ROWS)
    (tmp_path / "fp8.csv").unlink()
    file.write(2, ROWS)
    assert steps(tmp_path) == [2, 2]

"""The bar's one row, at every width: from what is known, as rich draws it."""

import io

import pytest
from rich.console import Console

from gpt2_fp8.callbacks.progress import BarLine


def drawn(line, columns):
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    console.print(line)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.fixture
def line():
    line = BarLine(19_073)
    line.step, line.loss, line.rate, line.left = 1200, 3.45214, 845_012.4, 9060.0
    line.validated = "val_loss 3.5000"
    return line


def test_everything_has_room(line):
    (row,) = drawn(line, 120)
    bar, text = row[:30], row[31:]
    assert bar.rstrip() == "━╸", "1,200 of 19,073 in 30 columns; without colours the rest is blank"
    assert text.rstrip() == "1,200/19,073  left 2 h 31 min  loss 3.4521  val_loss 3.5000  845,012 tok/s"


@pytest.mark.parametrize("columns", range(1, 121, 7))
def test_it_is_one_row_at_any_width(line, columns):
    (row,) = drawn(line, columns)
    assert len(row.rstrip()) < max(columns, 2)


def test_the_most_useful_stays_when_it_is_narrow(line):
    assert line.text(12) == "1,200/19,073"
    assert line.text(32) == "1,200/19,073  left 2 h 31 min"
    assert line.text(45) == "1,200/19,073  left 2 h 31 min  loss 3.4521"


def test_what_is_not_known_is_not_shown():
    assert BarLine(300).text(100) == "0/300"

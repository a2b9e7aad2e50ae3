"""The log's lines: every figure from known metrics, known losses and a clock of the test's own.

How the bar is drawn is in `tests/test_terminals.py`.
"""

import logging
import math
from dataclasses import replace
from types import SimpleNamespace

from gpt2_fp8.callbacks.progress import LogLine, ProgressBar, interval, validation
from gpt2_fp8.compose import preflight

METRICS = {
    "train_loss": 3.45214, "lr": 5.94e-4, "tokens_per_second": 845_012.4, "step_time": 0.0772, "data_wait": 0.004,
    "memory_gb": 18.62,
}  # fmt: skip


def test_an_interval():
    line = (
        "step  1,200/19,073  loss 3.4521  lr 5.9e-04    845,012 tok/s    77 ms   18.6 GiB  wait  0 %  left 2 h 31 min"
    )
    assert interval(1200, 19073, METRICS, 9060.0) == line


def test_the_first_interval_has_no_speed_yet():
    first = {key: METRICS[key] for key in ("train_loss", "lr")}
    assert interval(1, 300, first, None) == "step   1/300  loss 3.4521  lr 5.9e-04"


def test_lines_are_aligned_and_fit():
    wide = METRICS | {"train_loss": 10.98765, "tokens_per_second": 9_999_999, "step_time": 61.254, "memory_gb": 139.9}
    lines = [interval(step, 99_999, wide | {"data_wait": 0.99}, 86_000.0) for step in (1, 999, 10_000, 99_999)]
    assert {len(line) for line in lines} == {max(map(len, lines))}
    assert len(lines[0]) <= 110
    assert {line.index("loss") for line in lines} == {lines[0].index("loss")}


def test_a_validation():
    known = (3.6, 100)
    marks = {(3.5, None): "  best", (3.5, known): "  best", (3.7, known): "  (best 3.6000 at step 100)"}
    marks |= {(math.inf, None): "", (math.nan, known): "  (best 3.6000 at step 100)"}
    for (loss, best), mark in marks.items():
        assert validation(1200, 19073, loss, best) == f"step  1,200/19,073  val_loss {loss:.4f}{mark}"


def test_the_first_steps_tell_how_long(caplog):
    """Two steps of 2 s after a first one of 60 s: 4,096 tokens in 2 s, 297 steps are 594 s."""
    (config,), now = preflight([]), [0.0]
    callback = LogLine(config, lambda: None, lambda: None, clock=lambda: now[0])
    trainer = SimpleNamespace(global_step=0, sanity_checking=False)
    caplog.set_level(logging.INFO, "gpt2_fp8")
    callback.on_train_start(trainer, SimpleNamespace(step=None))
    for seconds in (60.0, 2.0, 2.0, 2.0):
        now[0] += seconds
        trainer.global_step += 1
        callback.on_train_batch_end(trainer)
    assert caplog.messages == ["297 more steps of 4,096 tokens at 2,048 tokens/s: about 9 min 54 s"]


def test_a_validation_is_compared_with_the_best_before_it(caplog):
    (config,) = preflight([])
    config = replace(config, trainer=replace(config.trainer, max_steps=1000))
    caplog.set_level(logging.INFO, "gpt2_fp8")
    callback = LogLine(config, lambda: None, lambda: (2.5, 100))
    trainer = SimpleNamespace(global_step=200, sanity_checking=False)
    callback.on_validation_end(trainer, SimpleNamespace(val_loss=2.75))
    assert caplog.records[0].getMessage() == "step   200/1,000  val_loss 2.7500  (best 2.5000 at step 100)"


def test_what_stands_beside_the_bar():
    bar = ProgressBar(19_073, lambda step: (19_073 - step) / 2 if step else None)
    assert bar.text() == "0/19,073"
    bar.on_train_batch_end(SimpleNamespace(global_step=1200))
    bar.read(1200, {"train_loss": 3.45214, "tokens_per_second": 845_012.4})
    bar.on_validation_end(None, SimpleNamespace(val_loss=3.5))
    assert bar.text() == "1,200/19,073  left 2 h 29 min  loss 3.4521  val_loss 3.5000  845,012 tok/s"

"""The first hour on a terminal, in a pipe and in a file: the bar, the log, Ctrl-C, and nothing of other libraries."""

import os
import re
import subprocess
import sys

from tests.runs import SMALL, forked, summary
from tests.terminals import Terminal

WIDE = 700  # columns: no line is wrapped
RUN = ["-m", "gpt2_fp8.run"]
CHANGED = ("progress_bar", "log_every", "checkpoint_every")
WORDS = [word for word in SMALL if not any(key in word for key in CHANGED)] + ["callbacks.checkpoint_every_n_steps=0"]
STAMP = re.compile(r"\[\d\d:\d\d:\d\d\] ")
BAR = re.compile(r"^([━╸╺]+ )?[\d,]+/[\d,]+  ")
# How a line of ours begins, after the time.
OURS = re.compile(
    r"(gpt2_fp8 |warm-up |model |device |launcher |precision |layers |optimizer |data |data: |steps |folder "
    r"|step +[\d,]+/|step \d+ waits for the checkpoint before it|sample at step "
    r"|completed |summary: |curves: |next: |[\d,]+ more steps? of )"
)


def rest_is_ours(lines):
    return [line for line in lines if not (STAMP.match(line) and OURS.match(STAMP.sub("", line)))]


def test_the_first_command_into_a_pipe_says_what_its_log_has_and_nothing_that_is_not_ours(tmp_path):
    """`srun` is there, as on a cluster's login node."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text("#!/bin/sh\n")
    (tmp_path / "bin/srun").chmod(0o755)
    words = ["trainer.max_steps=12", "trainer.val_check_interval=5", "data.val_sequences=4", "run_name=first"]
    words += ["model.n_layer=1", "global_batch_size=16"]
    done = subprocess.run(
        [sys.executable, *RUN, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert rest_is_ours(done.stdout.splitlines()) == []
    assert "\x1b" not in done.stdout
    assert (tmp_path / "outputs/first/run.log").read_text() == done.stdout
    assert "precision  fp32 instead of fp8_hybrid: " in done.stdout
    assert "sample at step 12: " in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["bin", "outputs"]
    assert os.listdir(tmp_path / "outputs") == ["first"]
    lines = [STAMP.sub("", line) for line in done.stdout.splitlines()]
    steps = [line.split()[1] for line in lines if line.startswith("step ") and "  loss " in line]
    assert steps == ["1/12", "10/12", "12/12"]
    losses = [line for line in lines if "  val_loss " in line]
    assert [line.split()[1] for line in losses] == ["5/12", "10/12", "12/12"]
    report = summary(tmp_path / "outputs/first")
    assert f"val_loss {report['last_val_loss']:.4f}" in losses[-1]
    assert losses[0].endswith("  best")
    again = forked(*words, cwd=tmp_path, code=2)
    assert "already holds a run, saved up to step-00000012" in again.stderr
    assert summary(tmp_path / "outputs/first") == report, "as the run that has the name left it"


def bars(terminal):
    return [row for row in terminal.text if BAR.match(row)]


def test_a_terminal_has_one_bar_and_whole_lines_above_it(tmp_path):
    terminal = Terminal(*RUN, *WORDS, "run_name=x", "trainer.log_every_n_steps=2", cwd=tmp_path, columns=WIDE)
    terminal.read_until(lambda t: len(bars(t)) == 1 and "val_loss" in "".join(t.text))
    assert terminal.end() == 0
    (bar,) = bars(terminal)
    report = summary(tmp_path / "outputs/x")
    assert f" 12/12  loss {report['last_train_loss']:.4f}  val_loss {report['last_val_loss']:.4f}" in bar
    assert rest_is_ours([row for row in terminal.text if row != bar]) == []
    shown = [row for row in terminal.text if re.search(r"step +\d+/12", row)]
    assert all("val_loss" in row or "sample" in row for row in shown), "the bar has the intervals' numbers"
    kept = (tmp_path / "outputs/x/run.log").read_text()
    assert len(re.findall(r"step +\d+/12  loss ", kept)) == 7, "and run.log has them"
    assert "\x1b" not in kept


LONG = [*WORDS, "trainer.max_steps=100000", "run_name=x", "data.val_sequences=0", "trainer.log_every_n_steps=5"]


def test_ctrl_c_leaves_the_message_below_and_the_terminal_sane(tmp_path):
    terminal = Terminal(*RUN, *LONG, cwd=tmp_path, columns=WIDE)
    terminal.read_until(lambda t: len(bars(t)) == 1 and "loss" in bars(t)[0])
    terminal.press(b"\x03")
    assert terminal.end() == 130
    text = terminal.text
    said = [row for row in text if "stopping and saving" in row]  # nothing, if it came in a wait for data
    assert all(row.startswith("SIGINT: ") for row in said), "not behind the bar"
    assert len(bars(terminal)) == 1
    assert text[-1] == "stopped by signal 2; run_name=x ckpt_path=last continues"
    assert summary(tmp_path / "outputs/x")["status"] == "stopped"
    assert not terminal.screen.cursor.hidden

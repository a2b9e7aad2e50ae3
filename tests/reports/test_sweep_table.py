"""A sweep's table from the folders of its jobs, which may hold anything."""

import csv
import io
import json
import os
import shlex
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread

from gpt2_fp8 import compare
from gpt2_fp8 import table as program
from gpt2_fp8.config import sweep_plan
from gpt2_fp8.reports import sweep_jobs, sweep_plot, sweep_table
from gpt2_fp8.reports.sweep_jobs import Job
from tests.reports import made


def leave(folder, *words, status="completed", **values):
    """What a job leaves in its folder."""
    folder.mkdir(parents=True)
    found = {"status": status, "message": "", "overrides": list(words), "steps": 12} | values
    (folder / "summary.json").write_text(json.dumps(found))


def job(name="0", *words, status="completed", loss=None, **values):
    return Job(folder=name, words=words, status=status, val_loss=loss, best_val_loss=loss, **values)


def cells(jobs):
    return list(csv.DictReader(io.StringIO(sweep_table.comma_separated(jobs))))


def test_best_first_then_without_validation_then_failed_then_not_run(tmp_path):
    leave(tmp_path / "0", "seed=1", status="failed", message="RuntimeError: x")
    leave(tmp_path / "1", "seed=2", last_val_loss=3.0, best_val_loss=2.5)
    leave(tmp_path / "2", "seed=3", last_val_loss=2.75)
    leave(tmp_path / "3", "seed=4", last_train_loss=1.0)
    leave(tmp_path / "4", "seed=5", status="diverged", best_val_loss=1.0, exit_code=3)
    leave(tmp_path / "5", "seed=6", status="stopped", last_val_loss=2.0, best_val_loss=2.0)
    sweep_plan.write(tmp_path, [[f"seed={seed}"] for seed in range(1, 9)])
    jobs = sweep_jobs.read(tmp_path)
    told = [(job.folder, job.status) for job in jobs]
    assert told == [
        ("5", "stopped"), ("1", "completed"), ("2", "completed"), ("3", "completed"), ("4", "diverged"),
        ("0", "failed"), (None, "not run"), (None, "not run"),
    ]  # fmt: skip
    assert [row["seed"] for row in cells(jobs)] == ["6", "2", "3", "4", "5", "1", "7", "8"]
    assert [row["best_val_loss"] for row in cells(jobs)][:2] == ["2.0", "2.5"]


def test_only_keys_that_differ_are_columns_with_group_choices_and_removed_keys():
    jobs = [job("0", "model=gpt2", "seed=1", "+tags.a=x"), job("1", "model=tiny", "seed=1", "~tags.a")]
    assert sweep_table.varied(jobs) == {"model": ["gpt2", "tiny"], "tags.a": ["x", "(removed)"]}
    assert sweep_table.varied(jobs[:1]) == {}
    assert sweep_table.varied([*jobs, job("2", "seed=1")])["model"] == ["gpt2", "tiny", ""]


def test_a_number_that_is_written_in_two_ways_does_not_differ():
    same = [job("0", "optim.lr=1e-3", "seed=nan", "x=1.0"), job("1", "optim.lr=0.001", "seed=nan", "x=1")]
    assert sweep_table.varied(same) == {}
    seeds = ["9007199254740992", "9007199254740993"]  # one number to a float
    assert sweep_table.varied([job("0", f"seed={seeds[0]}"), job("1", f"seed={seeds[1]}")]) == {"seed": seeds}
    typed = ["1e-3", "0.001", "2e-3"]
    assert sweep_table.varied([job("", f"optim.lr={value}") for value in typed]) == {"optim.lr": typed}, "as typed"


def test_a_job_without_a_summary_has_hydras_words_and_is_no_success(tmp_path):
    (tmp_path / "0/.hydra").mkdir(parents=True)
    (tmp_path / "0/.hydra/overrides.yaml").write_text("- seed=1\n- run_name='a b'\n")
    (tmp_path / "1").mkdir()
    (tmp_path / "1/metrics.csv").write_text("step\n")
    first, second = sweep_jobs.read(tmp_path)
    assert (first.words, first.status) == (("seed=1", "run_name='a b'"), "unfinished")
    assert (second.words, second.status) == ((), "unfinished")
    assert "no summary.json" in first.message


def test_a_precision_that_was_not_asked_for_is_noted(tmp_path):
    leave(tmp_path / "0", "seed=1", precision={"asked": "fp8_hybrid", "ran": "bf16", "reason": "no FP8 here"})
    (only,) = sweep_jobs.read(tmp_path)
    assert only.message == "ran bf16: no FP8 here"


def test_folders_of_every_name_and_depth_are_found_and_a_jobs_own_are_not_searched(tmp_path):
    for name in ("10", "2", "lr=0.1,seed=1", "a/b"):
        leave(tmp_path / name, f"seed={name}")
    leave(tmp_path / "2/checkpoints/x", "seed=7")
    assert {job.folder for job in sweep_jobs.read(tmp_path)} == {"10", "2", "lr=0.1,seed=1", "a/b"}


HOSTILE = [
    "{", "[]", "null", "7", '"x"', "{}", "[" * 100_000, '{"status": 7}', '{"status": ["completed"]}', "\x00", "",
    '{"status": "completed", "last_val_loss": NaN}', '{"status": "completed", "best_val_loss": 1e999}',
    '{"status": "completed", "last_val_loss": true, "steps": -1}', '{"overrides": [1, null]}',
    '{"overrides": "seed=1"}',
    '{"status": "completed", "best_val_loss": ' + "9" * 400 + "}", '{"steps": 1e400, "message": {"a": 1}}',
    '{"precision": [], "message": 7}', '{"precision": {"reason": {}, "ran": []}}',
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_summary_of_another_form_is_a_row(text, tmp_path, capsys):
    leave(tmp_path / "1", "seed=2", last_val_loss=3.0)
    leave(tmp_path / "0")
    (tmp_path / "0/summary.json").write_text(text)
    assert program.main([str(tmp_path)]) == 0
    rows = cells(sweep_jobs.read(tmp_path))
    assert rows[0]["job"] == "1", "it has a loss, and the other none"
    assert rows[1]["best_val_loss"] == ""
    assert "Sweep of 2 jobs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["{a: &x [1], b: *x}", "- !!python/object/apply:os.getcwd []", "[" * 5000, "\xff", "- 1"]
)
def test_overrides_of_another_form_are_none(text, tmp_path):
    (tmp_path / "0/.hydra").mkdir(parents=True)
    (tmp_path / "0/.hydra/overrides.yaml").write_bytes(text.encode("latin-1"))
    (only,) = sweep_jobs.read(tmp_path)
    assert only.words == ()


def test_links_and_pipes_are_not_read(tmp_path):
    leave(tmp_path / "other", "seed=1", last_val_loss=1.0)
    folder = tmp_path / "sweep"
    for name in ("0", "1"):
        (folder / name / ".hydra").mkdir(parents=True)
    (folder / "0/summary.json").symlink_to(tmp_path / "other/summary.json")
    os.mkfifo(folder / "1/summary.json")
    os.mkfifo(folder / "1/.hydra/overrides.yaml")
    (folder / "2").symlink_to(tmp_path / "other")
    assert [job.status for job in sweep_jobs.read(folder)] == ["unfinished"] * 2


def test_text_of_others_is_harmless_in_all_three_tables():
    told = "\x1b[31m=HYPERLINK(1) | <script> [x](javascript:1) `a`\nnext"
    jobs = [job("=1+1", 'notes=@SUM("a")', loss=1.0, message=told), job("1", "notes=-5", status="failed")]
    text = sweep_table.text(jobs)
    assert "\x1b" not in text
    assert len(text.splitlines()) == 4
    marked = sweep_table.markdown(jobs)
    assert len(marked.splitlines()) == 4
    assert "<script>" not in marked
    assert "[x](" not in marked.replace("\\[x](", "")
    assert "| " in marked
    assert marked.splitlines()[2].replace("\\|", "").count("|") == marked.splitlines()[0].count("|")
    row, other = cells(jobs)
    assert row["job"] == "'=1+1"
    assert row["notes"] == '\'@SUM("a")'
    assert other["notes"] == "-5", "a number stays one"
    assert not row["note"].startswith(("=", "\x1b"))


def test_a_thousand_jobs_are_few_lines_on_a_terminal_and_all_in_the_files():
    jobs = [job(str(n), f"seed={n}", *(f"tags.k{key}={n}" for key in range(9)), loss=float(n)) for n in range(1000)]
    lines = sweep_table.text(jobs).splitlines()
    assert len(lines) == sweep_table.MOST_LINES + 3
    assert lines[-1] == "960 more jobs and 4 more keys that differ: in sweep.csv"
    assert max(map(len, lines)) < 250
    assert len(cells(jobs)) == 1000
    assert len(sweep_table.markdown(jobs).splitlines()) == 1002
    assert "tags.k8" in cells(jobs)[0]


def test_a_picture_of_any_text(tmp_path):
    pytest.importorskip("matplotlib")
    jobs = [job("0", "notes=$\\frac{", loss=1.0), job("1", "notes=\u4e2d$", loss=2.0), job("2", status="failed")]
    jobs[1] = replace(jobs[1], val_loss=2.5)
    assert sweep_plot.plot(jobs, sweep_table.varied(jobs), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert not sweep_plot.plot(jobs[2:], {}, tmp_path / "y.png")


def test_the_program_names_what_is_no_sweep(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert program.main([str(tmp_path / name) for name in ("empty", "file", "nothing")]) == 2
    told = capsys.readouterr().err
    for reason in ("holds no job of a sweep", "is a file", "does not exist"):
        assert reason in told
    assert len(told.splitlines()) == 6


def test_the_program_writes_through_no_link(tmp_path, capsys):
    leave(tmp_path / "s/0", "seed=1", last_val_loss=1.0)
    (tmp_path / "precious").write_text("mine")
    for name in ("sweep.csv", "sweep.md", "sweep.png", ".sweep.tmp.png", ".sweep.csv.tmp"):
        (tmp_path / "s" / name).symlink_to(tmp_path / "precious")
    assert program.main([str(tmp_path / "s")]) == 0
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "s/sweep.csv").read_text().startswith("job,status,")


def test_a_folder_that_cannot_be_written_costs_the_files_alone(tmp_path, capsys, monkeypatch):
    leave(tmp_path / "0", "seed=1", last_val_loss=1.25)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpt2_fp8.checkpoint.durable.write_text", full)
    assert program.main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "1.2500" in out
    assert "No space left" in err


def test_what_to_type_next_is_told_and_followed(tmp_path, monkeypatch, capsys):
    """TensorBoard's folder, and a comparison that runs; with one completed job there is nothing to compare."""
    monkeypatch.chdir(tmp_path)
    place, told = "outputs/my sweep", []
    for seed, status in enumerate(("completed", "failed", "completed")):
        made.run(f"{place}/{seed}", made.rows(lambda step: 3.0), made.settings(seed=seed), status=status)
        assert program.main([place]) == 0
        told.append(capsys.readouterr().out.splitlines())
    curves = "curves: tensorboard --logdir 'outputs/my sweep'"
    assert told[0][-1] == told[1][-1] == told[2][-2] == curves
    command, _, words = told[2][-1].partition("gpt2_fp8.compare ")
    assert command == "next: python -m "
    assert compare.main(shlex.split(words)) == 0


def test_where_final_equals_best_both_are_in_the_picture(tmp_path):
    """The ring of the final loss is around the dot of the best one."""
    jobs = [job(str(place), f"seed={place}", loss=3.0 + place) for place in range(10)]
    assert sweep_plot.plot(jobs, sweep_table.varied(jobs), tmp_path / "p.png")
    pixels = imread(tmp_path / "p.png")[:, :, :3]
    for colour in ((31, 119, 180), (255, 127, 14)):
        near = abs(pixels - np.array(colour) / 255).max(axis=2) < 0.05
        assert near.sum() > 10 * 30, "more than the legend's own"

"""A sweep's table from the folders of its jobs, which may hold anything."""

import csv
import json

import pytest

from gpt2_fp8 import table as program
from gpt2_fp8.config import own_words
from gpt2_fp8.reports import sweep
from gpt2_fp8.reports.sweep import Job


def leave(folder, *words, status="completed", **values):
    folder.mkdir(parents=True, exist_ok=True)
    found = {"status": status, "message": "", "overrides": list(words), "steps": 12} | values
    (folder / "summary.json").write_text(json.dumps(found))


def cells(folder):
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_best_first_then_without_validation_then_failed_then_not_run(tmp_path, capsys):
    leave(tmp_path / "0", "seed=1", status="failed", message="error: RuntimeError: x\nmore")
    leave(tmp_path / "1", "seed=2", last_val_loss=3.0, best_val_loss=2.5)
    leave(tmp_path / "2", "seed=3", last_val_loss=2.75)
    leave(tmp_path / "a/b", "seed=4", last_train_loss=1.0, precision={"ran": "bf16", "reason": "no FP8 here"})
    leave(tmp_path / "4", "seed=5", status="diverged", best_val_loss=1.0)
    leave(tmp_path / "5", "seed=6", status="stopped", last_val_loss=2.0, best_val_loss=2.0)
    own_words.write_plan(tmp_path, [[f"seed={seed}"] for seed in range(1, 9)])
    assert program.main([str(tmp_path)]) == 0
    rows = cells(tmp_path)
    assert [(row["job"], row["status"]) for row in rows] == [
        ("5", "stopped"), ("1", "completed"), ("2", "completed"), ("a/b", "completed"), ("4", "diverged"),
        ("0", "failed"), ("", "not run"), ("", "not run"),
    ]  # fmt: skip
    assert [row["seed"] for row in rows] == ["6", "2", "3", "4", "5", "1", "7", "8"]
    assert [row["best_val_loss"] for row in rows][:3] == ["2.0", "2.5", ""]
    assert (rows[3]["note"], rows[5]["note"]) == ("ran bf16: no FP8 here", "RuntimeError: x")
    out = capsys.readouterr().out
    assert "Sweep of 8 jobs: 1 stopped, 3 completed" in out
    assert (tmp_path / "sweep.md").read_text().splitlines()[2:] == out.splitlines()[3:13]
    assert out.splitlines()[-1].startswith("next: python -m gpt2_fp8.compare ")


def test_only_keys_that_differ_are_columns_with_group_choices_and_removed_keys():
    jobs = [
        Job("0", ("model=gpt2", "seed=1", "+tags.a=x"), "completed"),
        Job("1", ("model=tiny", "~tags.a"), "completed"),
    ]
    assert sweep.find_varied(jobs) == {"model": ["gpt2", "tiny"], "seed": ["1", ""], "tags.a": ["x", "(removed)"]}
    same = [Job("0", ("optim.lr=1e-3", "x=1.0"), "completed"), Job("1", ("optim.lr=0.001", "x=1"), "completed")]
    assert sweep.find_varied(same) == {}, "a number that is written in two ways"


def test_a_job_without_a_summary_has_hydras_words_and_is_no_success(tmp_path):
    (tmp_path / "0/.hydra").mkdir(parents=True)
    (tmp_path / "0/.hydra/overrides.yaml").write_text("- seed=1\n- run_name='a b'\n")
    (tmp_path / "1").mkdir()
    (tmp_path / "1/metrics.csv").write_text("step\n")
    first, second = sweep.read(tmp_path)
    assert (first.words, first.status) == (("seed=1", "run_name='a b'"), "unfinished")
    assert (second.words, second.status) == ((), "unfinished")


def test_a_sweep_in_the_folder_of_a_run_has_its_jobs_alone(tmp_path):
    leave(tmp_path, "seed=1", last_val_loss=3.0)
    assert [(job.folder, job.status) for job in sweep.read(tmp_path)] == [(".", "completed")]
    leave(tmp_path / "0", "seed=2", last_val_loss=2.0)
    own_words.write_plan(tmp_path, [["seed=2"], ["seed=1"]])
    assert [(job.folder, job.status) for job in sweep.read(tmp_path)] == [("0", "completed"), ("", "not run")]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "null", "", "\x00", '{"status": ["completed"]}', '{"status": "completed", "last_val_loss": true}',
     '{"overrides": [1, null]}', '{"precision": [], "message": 7}'],
)  # fmt: skip
def test_a_summary_of_another_form_is_a_row(text, tmp_path):
    leave(tmp_path / "1", "seed=2", last_val_loss=3.0)
    leave(tmp_path / "0")
    (tmp_path / "0/summary.json").write_text(text)
    assert program.main([str(tmp_path)]) == 0
    assert [(row["job"], row["val_loss"]) for row in cells(tmp_path)] == [("1", "3.0"), ("0", "")]


def test_text_of_others_is_harmless(tmp_path, capsys):
    leave(tmp_path / "0", "notes=$\\frac{", last_val_loss=1.0, message="\x1b[31m | <script> [x](javascript:1) `a`")
    leave(tmp_path / "1", "notes=\u4e2d$")
    assert program.main([str(tmp_path)]) == 0
    out, marked = capsys.readouterr().out, (tmp_path / "sweep.md").read_text()
    assert "\x1b" not in out + marked
    assert r"\| \<script> \[x\](javascript:1) \`a\`" in marked


def test_many_jobs_are_few_lines_on_a_terminal_and_all_in_the_files(tmp_path, capsys):
    for n in range(60):
        leave(tmp_path / str(n), f"seed={n}", last_val_loss=float(n))
    assert program.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "20 more jobs: in sweep.csv" in out
    assert len(out.splitlines()) < 52
    assert len(cells(tmp_path)) == 60


def test_what_is_no_sweep_is_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert program.main([str(tmp_path / name) for name in ("empty", "file", "nothing")]) == 2
    assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]) == 3

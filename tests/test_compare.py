"""The comparison program: real sweeps compared, hostile text shown harmlessly, and how mistakes are answered."""

import json
import re
import sys

import pytest
from matplotlib.image import imread

from gpt2_fp8 import compare
from gpt2_fp8.reports import render
from tests import forkserver
from tests.reports.made import rows, run, settings
from tests.runs import SMALL, forked

HOSTILE = "<script>alert(1)</script>|`x`\x1b[31m[a](http://x)"


def pair(folder):
    run(folder / "b", rows(lambda step: 3.0, validations={100: 4.0}), settings("bf16"))
    run(folder / "f", rows(lambda step: 3.3, seconds=0.25, validations={100: 4.4}), settings("fp8_hybrid"))
    return folder


def told(capsys, *argv, code=2):
    assert compare.main([str(word) for word in argv]) == code
    out, err = capsys.readouterr()
    return err if code else out


@pytest.mark.slow
def test_real_sweeps_of_emulated_fp8_and_bf16(tmp_path):
    """Two seeds each, by the programs as they are typed."""
    for name, own in (("bf16", ["precision=bf16"]), ("fp8", ["precision.backend=emulated", "recipe=current"])):
        done = forked("-m", *SMALL, "data.seed=0", "seed=1,2", f"run_name={name}", *own, cwd=tmp_path, code=0)
    compared = ["runs=[outputs/bf16,outputs/fp8]", "--out", "cmp", "--json"]
    done = forkserver.python("-m", "gpt2_fp8.compare", *compared, cwd=tmp_path, code=0)
    found = json.loads(done.stdout)
    assert [row["condition"] for row in found["runs"]] == ["bf16", "fp8_hybrid"]
    validation = {row["condition"]: row for row in found["losses"] if row["loss"] == "validation"}
    for condition, name in (("bf16", "bf16"), ("fp8_hybrid", "fp8")):
        losses = [
            json.loads((tmp_path / f"outputs/{name}/{n}/summary.json").read_text())["last_val_loss"] for n in (0, 1)
        ]
        assert validation[condition]["mean"] == pytest.approx(sum(losses) / 2)
    assert abs(validation["fp8_hybrid"]["relative"]) < 0.05
    assert validation["fp8_hybrid"]["paired_error"] > 0
    assert (found["notes"], len(found["verdict"]), len(found["equal_loss"])) == ([], 1, 1)
    assert imread(tmp_path / "cmp/compare.png").shape[0] > 400


def test_the_files_and_what_is_printed(tmp_path, capsys):
    shown = told(capsys, pair(tmp_path), "--price", "7.2", code=0)
    assert "+10.00%" in shown
    assert "| base cost |" in shown
    result = shown.splitlines()[2]
    assert result.startswith("bf16 has the lowest validation loss, 4.0000; the next, fp8_hybrid, is 10.00% above it.")
    assert result.endswith("; 2.00 times as fast.")
    assert shown.startswith((tmp_path / "compare.md").read_text())
    assert shown.rstrip().endswith(", ".join(render.FILES))
    page = (tmp_path / "compare.html").read_text()
    assert "+10.00%</td>" in page
    assert 'src="data:image/png;base64,' in page
    assert json.loads(told(capsys, tmp_path, "--json", code=0))["throughput"][1]["times_base"] == 2.0


def test_a_home_that_the_shell_leaves(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(pair(tmp_path)))
    told(capsys, "runs=[~/b,~/f]", "--out=~/cmp", code=0)
    assert (tmp_path / "cmp/compare.md").is_file()
    assert "~no-such-user/f is no folder" in told(capsys, "~no-such-user/f", code=2)


def test_json_has_null_for_what_is_no_number(tmp_path, capsys):
    for name in ("bf16", "fp8_hybrid"):
        run(tmp_path / name, rows(lambda step: float("nan")), settings(name), status="diverged")
    found = json.loads(told(capsys, tmp_path, "--json", code=0), parse_constant=pytest.fail)
    assert [row["mean"] for row in found["losses"]] == [None, None]


def test_best_first_and_on_a_terminal_within_100_columns(tmp_path, monkeypatch, capsys):
    for place, loss in enumerate((4.2, 4.1, 4.3)):
        changed = {"optim__lr": place, "model__name": f"a name of many words {'x' * 60} {place}"}
        run(tmp_path / str(place), rows(lambda step: 3.0, validations={100: loss}), settings("fp8_hybrid", **changed))
    pair(tmp_path)
    found = json.loads(told(capsys, tmp_path, "--json", code=0))
    assert [row["mean"] for row in found["losses"] if row["loss"] == "validation"] == [4.0, 4.1, 4.2, 4.3, 4.4]
    assert found["losses"][0]["condition"].startswith("bf16")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = told(capsys, tmp_path, code=0)
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    assert max(map(len, lines)) <= 100 < max(map(len, (tmp_path / "compare.md").read_text().splitlines()))
    assert sum(" tokens ratio " in line for line in lines) == 1


def test_hostile_text_is_shown_and_not_obeyed(tmp_path, capsys):
    """In names of folders and conditions, notes and statuses."""
    spoilt = settings("fp8_hybrid", optim__lr=HOSTILE, seed=HOSTILE)
    logged = rows(lambda step: 3.0, validations={100: 4.0})
    made = {"status": HOSTILE, "kernels": {"layers": HOSTILE}, "reason": HOSTILE, "ran": HOSTILE}
    run(pair(tmp_path) / "<img src=x onerror=y>", logged, spoilt, **made)
    shown = told(capsys, tmp_path, code=0)
    page, text = ((tmp_path / f"compare.{kind}").read_text() for kind in ("html", "md"))
    assert set(re.findall(r"<(script|a|iframe|form)\b", page)) == set()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page, "it is shown as text"
    assert "\x1b" not in page + text + shown
    assert re.search(r"(?<!\\)<script>|(?<!\\)\[a", text) is None


def test_every_mistake_is_told_at_once(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    text = told(capsys, tmp_path / "none", tmp_path / "file", "--out", tmp_path / "file", "--price", -1)
    assert len(re.findall("^error: ", text, re.MULTILINE)) == 4


def test_one_run_alone_or_none_says_why(tmp_path, capsys):
    pair(tmp_path)
    assert "1 run can be read" in told(capsys, tmp_path / "b")
    (tmp_path / "f/summary.json").unlink()
    assert "f: no summary.json" in told(capsys, tmp_path)


def test_a_base_by_its_name_or_its_beginning(tmp_path, capsys):
    pair(tmp_path)
    assert "['bf16', 'fp8_hybrid']" in told(capsys, tmp_path, "--base", "fp8_hybird")
    for name in ("fp8_hybrid", "fp8"):
        assert "Compared with fp8_hybrid" in told(capsys, tmp_path, "--base", name, code=0)


def test_without_matplotlib_the_rest_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "compare.png" not in told(capsys, pair(tmp_path), code=0)
    assert (tmp_path / "compare.html").exists()

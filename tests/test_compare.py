"""The comparison program: real sweeps compared, hostile text shown harmlessly, and how each mistake is answered."""

import json
import re
import shlex
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imread

from gpt2_fp8 import compare
from gpt2_fp8.reports import compare_record
from tests import forkserver
from tests.reports.made import rows, run, settings
from tests.runs import SMALL, forked

FAST = [word for word in SMALL if not word.startswith("callbacks.sample_tokens")]
HOSTILE = "<script>alert(1)</script>|`x`\x1b[31m[a](http://x)"


def pair(folder, **made):
    """A run in bf16 and one in FP8."""
    run(folder / "b", rows(lambda step: 3.0, validations={100: 4.0}), settings("bf16"), samples={50: "a", 100: "b"})
    logged = rows(lambda step: 3.3, seconds=0.25, validations={100: 4.4})
    run(folder / "f", logged, settings("fp8_hybrid"), samples={50: "c", 100: "d"}, **made)
    return folder


def told(capsys, *argv, code=2):
    assert compare.main([str(word) for word in argv]) == code
    out, err = capsys.readouterr()
    return err if code else out


def fix(text):
    """The remedy of the only problem that was told, in two lines."""
    lines = text.splitlines()
    assert [line.partition(":")[0].strip() for line in lines] == ["error", "fix"], text
    return lines[1].partition(": ")[2]


@pytest.mark.whole
def test_real_sweeps_of_emulated_fp8_and_bf16(tmp_path):
    """Two seeds each, by the programs as they are typed."""
    words = [*FAST, "data.seed=0", "callbacks.sample_tokens=8"]
    for name, own in (("bf16", ["precision=bf16"]), ("fp8", ["precision.backend=emulated", "recipe=current"])):
        done = forked("-m", *words, "seed=1,2", f"run_name={name}", *own, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "gpt2_fp8.compare", "runs=[outputs/bf16,outputs/fp8]", "--out", "cmp"]
    done = forkserver.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4 runs of 2 conditions, up to the 3,072 tokens that all have" in done.stdout
    assert "FP8 was emulated" in done.stdout
    found = json.loads((tmp_path / "cmp/compare.json").read_text())
    base, fp8 = found["conditions"]
    assert (base["name"], fp8["name"]) == ("bf16", "fp8_hybrid")
    for condition, name in ((base, "bf16"), (fp8, "fp8")):
        for place, one in enumerate(condition["runs"]):
            summary = json.loads((tmp_path / f"outputs/{name}/{place}/summary.json").read_text())
            assert condition["validation"]["loss"]["values"][place] == summary["last_val_loss"]
            assert set(one["samples"]) == {"5", "10", "12"}
    own, other = (c["validation"]["loss"]["mean"] for c in (fp8, base))
    assert fp8["validation"]["difference"]["value"] == pytest.approx(own - other)
    assert fp8["validation"]["paired"]["error"] > 0
    assert abs(fp8["validation"]["relative"]) < 0.05
    assert fp8["differs_from_base_in"] == []
    answers = {line["item"]: line["answer"] for line in found["verdicts"][0]["lines"]}
    assert answers["No NaN losses or instability"] == answers["TensorBoard logs"] == "holds"
    assert imread(tmp_path / "cmp/compare.png").shape[0] > 500


def test_the_four_files_and_json(tmp_path, capsys):
    pair(tmp_path)
    shown = told(capsys, tmp_path, code=0)
    assert "+10.00 %" in shown
    assert "at step" not in shown, "samples are in the files"
    for name in compare_record.FILES:
        assert (tmp_path / name).stat().st_size > 0
    assert "+0.4000 (one seed)" in (tmp_path / "compare.md").read_text()
    assert "Samples at step 50" in (tmp_path / "compare.md").read_text()
    printed = json.loads(told(capsys, tmp_path, "--json", code=0))
    assert printed == json.loads((tmp_path / "compare.json").read_text())
    assert printed["conditions"][1]["validation"]["relative"] == pytest.approx(0.1)
    assert printed["conditions"][1]["speed"]["tokens_per_second"]["mean"] == 400


def test_runs_go_to_a_new_folder_and_an_earlier_comparison_is_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pair(tmp_path / "mine")
    told(capsys, "mine/b", "mine/f", code=0)
    (made,) = (tmp_path / "outputs").iterdir()
    assert re.fullmatch(r"compare-[\d_-]+", made.name)
    told(capsys, "mine", code=0)
    (tmp_path / "mine/compare.png").unlink()
    (tmp_path / "mine/compare.png").symlink_to("elsewhere")
    told(capsys, "mine", code=0)
    assert not (tmp_path / "mine/elsewhere").exists()


class Tags(HTMLParser):
    """The tags of a page, and where it would fetch something from."""

    def __init__(self):
        super().__init__()
        self.tags, self.from_where, self.text = set(), [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.from_where += [
            value for name, value in attrs if name in ("src", "href", "action") or name.startswith("on")
        ]

    def handle_data(self, data):
        self.text += data


def test_hostile_text_is_shown_and_not_obeyed(tmp_path, capsys):
    """In names of folders and conditions, notes, statuses and samples."""
    spoilt = settings("fp8_hybrid")
    spoilt["optim"]["lr"] = spoilt["seed"] = HOSTILE
    pair(tmp_path)
    logged = rows(lambda step: 3.0, validations={100: 4.0})
    run(
        tmp_path / "<img src=x onerror=y>", logged, spoilt, status=HOSTILE, device=HOSTILE,
        samples={50: "```\n# no heading\n" + HOSTILE, 100: HOSTILE}, kernels={"layers": HOSTILE},
        reason=HOSTILE, ran=HOSTILE,
    )  # fmt: skip
    shown = told(capsys, tmp_path, code=0)
    page, text = ((tmp_path / f"compare.{kind}").read_text() for kind in ("html", "md"))
    parsed = Tags()
    parsed.feed(page)
    assert parsed.tags & {"script", "a", "iframe", "link", "form"} == set()
    (picture,) = parsed.from_where
    assert picture.startswith("data:image/png;base64,")
    assert "<script>alert(1)</script>" in parsed.text, "it is shown as text"
    assert "\x1b" not in page + text + shown
    outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "<script>" not in outside
    assert "[a](" not in outside.replace("\\[", "")
    assert "# no heading" not in outside


def test_no_folder(capsys):
    assert "outputs/RUN_NAME" in fix(told(capsys))


def test_every_mistake_is_told_at_once(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    text = told(capsys, tmp_path / "none", tmp_path / "file", "run=[a]", "--out", tmp_path / "file")
    assert len(re.findall("^error: ", text, re.MULTILINE)) == 4
    assert "did you mean runs=[A,B]?" in text


def test_one_run_alone_and_what_to_do(tmp_path, capsys):
    """The remedy: a second folder."""
    pair(tmp_path)
    assert fix(told(capsys, tmp_path / "b")).startswith("give a second run's folder too")
    told(capsys, tmp_path / "b", tmp_path / "f", "--out", tmp_path / "out", code=0)


def test_no_run_says_why(tmp_path, capsys):
    (tmp_path / "0").mkdir()
    (tmp_path / "0/metrics.csv").write_text("step\n")
    text = told(capsys, tmp_path)
    assert "no run can be read there; 0: it has neither summary.json nor .hydra/config.yaml: it never began" in text
    fix(text)


def test_the_remedy_names_a_sweep_that_composes():
    from gpt2_fp8.compose import preflight

    words = shlex.split(compare._ANOTHER.partition("python -m gpt2_fp8.run ")[2])
    assert len(preflight(words)) == 4


def test_an_unknown_base_is_told_with_those_there_are(tmp_path, capsys):
    pair(tmp_path)
    remedy = fix(told(capsys, tmp_path, "--base", "fp8_hybird"))
    assert remedy == "--base fp8_hybrid"
    shown = told(capsys, tmp_path, *shlex.split(remedy), code=0)
    assert "fp8_hybrid (base)" in shown
    assert "bf16 (base)" in told(capsys, tmp_path, "--base", "bf", code=0), "a beginning is enough"


def test_an_unknown_flag(capsys):
    assert "--help" in fix(told(capsys, "--nonesuch", "x"))


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    pair(tmp_path)
    (tmp_path / "file").write_text("")
    assert "--out FOLDER" in fix(told(capsys, tmp_path, "--out", tmp_path / "file/below", code=1))


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        compare.main(["--help"])
    assert ended.value.code == 0
    assert "--base NAME" in capsys.readouterr().out


def test_without_matplotlib_the_rest_is_written(tmp_path, monkeypatch, capsys):
    import builtins

    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert 'pip install -e ".[bench]"' in told(capsys, pair(tmp_path), code=0)
    assert not (tmp_path / "compare.png").exists()
    assert "compare.png" not in (tmp_path / "compare.md").read_text()
    assert Path(tmp_path / "compare.html").exists()


def test_many_runs_are_announced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "_QUIET_SECONDS", -1.0)
    assert compare.main([str(pair(tmp_path))]) == 0
    assert "reading runs: 1 of 2" in capsys.readouterr().err

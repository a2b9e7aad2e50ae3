"""Mistakes on the command lines of the programs that take paths: a cause and a remedy each, and exit code 2."""

import shlex
from contextlib import suppress
from importlib import import_module

import pytest

from gpt2_fp8.runtime import programs

PATHS = ("compare", "export", "import_hf", "table")  # what these cannot do without
EXPORT = "python -m gpt2_fp8.export"


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/first/checkpoints").mkdir(parents=True)
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported/config.json").write_text("{}")


def told(capsys, name, line):
    """The cause and the remedy of a command line's only mistake."""
    assert import_module(f"gpt2_fp8.{name}").main(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    cause, remedy = err.splitlines()
    assert cause.startswith("error: ")
    assert remedy.startswith("  fix: ")
    return cause.removeprefix("error: "), remedy.removeprefix("  fix: ")


@pytest.mark.parametrize("name", PATHS)
def test_what_is_missing(capsys, name):
    cause, remedy = told(capsys, name, "")
    assert "required" in cause or "no folder" in cause
    assert f"python -m gpt2_fp8.{name}" in remedy


@pytest.mark.parametrize(
    ("name", "line", "meant"),
    [
        ("doctor", "--jsn", "--json"),
        ("compare", "x y --jsom", "--json"),
        ("export", "a b --no-tokeniser", "--no-tokenizer"),
    ],
)
def test_a_flag_that_is_none_leads_to_the_one_that_is_like_it(capsys, name, line, meant):
    assert told(capsys, name, line)[1].startswith(f"did you mean {meant}?")


def test_a_flag_without_its_value_does_not_lead_to_itself(capsys):
    assert told(capsys, "schedule", "--picture") == (
        "argument --picture: expected one argument",
        "python -m gpt2_fp8.schedule --help shows what it takes",
    )


@pytest.mark.parametrize(
    ("name", "line", "meant"),
    [
        ("export", "ckpt_path=outputs/first folder=x", "outputs/first x"),
        ("export", "outputs/first out=x", "outputs/first x"),
        ("import_hf", "init_from=exported x", "exported x"),
        ("table", "runs=outputs/first", "outputs/first"),
    ],
)
def test_paths_are_plain_words(capsys, name, line, meant):
    assert told(capsys, name, line)[1] == f"python -m gpt2_fp8.{name} {meant}"


def test_what_is_exported_already_is_not_exported(capsys):
    cause, remedy = told(capsys, "export", "exported x")
    assert cause == "exported: it is a Hugging Face folder, and no checkpoint"
    assert remedy.startswith("give a run's folder, outputs/RUN")
    assert told(capsys, "export", "outputs x")[0].startswith("outputs: it has neither checkpoints")


@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_a_hugging_face_folder_is_imported_first(capsys, name):
    cause, remedy = told(capsys, name, "ckpt_path=exported")
    assert cause == "ckpt_path=exported: it is a Hugging Face folder, and no checkpoint"
    assert remedy.startswith("python -m gpt2_fp8.import_hf exported FOLDER ")


@pytest.mark.parametrize("name", ["generate", "evaluate"])
@pytest.mark.parametrize(("word", "remedy"), [("outputs/first", "ckpt_path=outputs/first"), ("exported", "import_hf")])
def test_a_folder_without_a_key(capsys, name, word, remedy):
    assert import_module(f"gpt2_fp8.{name}").main([word]) == 2
    first, fix, *_ = capsys.readouterr().err.splitlines()
    assert first == f"error: {word} is not of the form key=value"
    assert remedy in fix


def test_a_picture_is_a_file(capsys):
    assert told(capsys, "schedule", "--picture exported")[1] == "name a file in it: --picture exported/schedule.png"
    cause, remedy = told(capsys, "schedule", "--picture /proc/x.png")
    assert cause.startswith("--picture /proc/x.png: /proc cannot be written: ")
    assert remedy == "choose a file in a folder that can be written: --picture FILE"


def test_a_license_is_an_identifier(capsys):
    assert told(capsys, "export", "outputs/first x --license 'Apache 2'")[1].startswith("--license apache-2.0")


@pytest.mark.parametrize("name", [name for name in programs.names() if name != "run"])
def test_help_says_the_exit_codes(capsys, name):
    with suppress(SystemExit):  # argparse's
        import_module(f"gpt2_fp8.{name}").main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 " in shown
    assert "130" in shown

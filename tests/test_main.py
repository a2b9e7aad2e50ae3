"""`gpt2-fp8`, and `python -m gpt2_fp8`: the list of programs, each of them by its name, the version."""

import os
import re

import pytest

from gpt2_fp8 import __main__, __version__
from gpt2_fp8.runtime import programs
from tests import forkserver

NAMES = programs.names()


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_the_programs_are_listed(arguments, capsys):
    """Each by the first line of its own docstring, `run` first."""
    assert __main__.main(list(arguments)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.findall(r"gpt2-fp8 (\w+) ", said)[: len(NAMES)] == NAMES
    for name, about in programs.table().items():
        assert f"gpt2-fp8 {name} {about}" in said
    assert NAMES[0] == "run"


def test_help_of_a_program_and_a_program_that_there_is_not(capsys, tmp_path):
    """In a process of its own, whose output the program prepares."""
    done = forkserver.python("-m", "gpt2_fp8", "help", "export", cwd=tmp_path, code=0)
    assert "Writes a checkpoint for transformers" in done.stdout
    assert __main__.main(["help", "exprot"]) == 2
    assert capsys.readouterr().err == "error: there is no program exprot\n  fix: gpt2-fp8 export\n"
    assert __main__.main(["bnech"]) == 2
    assert capsys.readouterr().err == "error: there is no program bnech\n  fix: gpt2-fp8 bench\n"
    assert __main__.main(["trian"]) == 2
    assert capsys.readouterr().err == "error: there is no program trian\n  fix: gpt2-fp8 run\n"
    assert __main__.main(["qqq"]) == 2
    assert f"the programs are {', '.join(NAMES)}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["bnech"], []])
def test_one_of_several_processes_says_it(words, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")  # alone: left in a shell
    assert __main__.main(words) == (2 if words else 0)
    assert "".join(capsys.readouterr())
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert __main__.main(words) == (2 if words else 0)
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.mark.parametrize("name", NAMES)
def test_each_program_says_our_version_and_has_a_help(name, tmp_path):
    done = forkserver.python("-m", f"gpt2_fp8.{name}", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"gpt2_fp8 {__version__}\n", "")
    done = forkserver.python("-m", "gpt2_fp8", name, "--help", cwd=tmp_path, code=0)
    assert f"gpt2_fp8.{name}" in done.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "words", [["run", "modle=gpt2"], ["-m", "modle=gpt2,tiny"], ["~modle=gpt2"], ["evaluate", "ckpt_path=modle"]]
)
def test_words_are_those_of_a_run_unless_they_name_a_program(words, tmp_path):
    done = forkserver.python("-m", "gpt2_fp8", *words, cwd=tmp_path, code=2)
    assert "modle" in done.stderr

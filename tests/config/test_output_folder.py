"""A folder to write to is tried by writing, and left as it was."""

import os

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import output_folder
from gpt2_fp8.config.errors import UserError


def test_the_folder_is_tested_by_writing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        preflight(["hydra.run.dir=file/run"])
    (problem,) = caught.value.problems
    assert "file is a file, not a folder" in problem.cause
    assert output_folder.check(tmp_path / "a" / "b", "hydra.run.dir") == []
    assert os.listdir(tmp_path) == ["file"], "nothing stays"


def test_a_folder_that_refuses_writing():
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs a file system that even root cannot write to")
    (finding,) = output_folder.check("/proc/self/run", "hydra.run.dir")
    assert "cannot be written" in finding.problem.cause

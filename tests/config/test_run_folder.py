"""What stands in the place of a run's folder, and what is left in it."""

import os
import time

import pytest

from gpt2_fp8.checkpoint.space import require_writable
from gpt2_fp8.config import output_folder, run_folder
from gpt2_fp8.config.errors import UserError


def make_link(path):
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "is a pipe, not a folder"),
        (make_link, "is a link that leads nowhere, not a folder"),
        (lambda path: path.write_text(""), "is a file, not a folder"),
    ],
)
def test_what_is_no_folder_is_called_what_it_is(tmp_path, make, words):
    make(tmp_path / "x")
    (found,) = output_folder.check(tmp_path / "x/run", "hydra.run.dir")
    assert f"{tmp_path}/x {words}" in found.problem.cause
    with pytest.raises(UserError, match=words):
        require_writable(tmp_path / "x/run")


def test_what_a_killed_start_left_is_cleared(tmp_path):
    """Only what such a start makes, and not what another one is at."""
    old, new, kept = (tmp_path / f".write-test-{name}" for name in ("old", "new", "kept"))
    for folder in (old, new, kept):
        folder.mkdir()
        (folder / "file").write_bytes(run_folder.TRIAL)
    (kept / "mine").write_text("")
    (tmp_path / ".write-test-file").write_text("")
    for path in (old, kept, tmp_path / ".write-test-file"):
        os.utime(path, (time.time() - 3600,) * 2)
    assert run_folder.unwritable(tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".write-test-file", ".write-test-kept", ".write-test-new",
    ]  # fmt: skip

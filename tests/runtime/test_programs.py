"""What the programs share: how they end, and what they refuse."""

import errno
import os
import subprocess
import sys

import pytest

from gpt2_fp8.config.errors import DataSourceLost, UserError
from gpt2_fp8.runtime import process_end, programs


def raising(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError.of("no"), 2),
        (DataSourceLost("lost"), 4),
        (KeyboardInterrupt(), 130),
        (OSError(errno.ENOSPC, "full"), 1),
    ],
)
def test_a_program_ends_with_the_code_of_its_error(error, code, capsys):
    assert programs.exit_code(raising(error)) == code
    assert bool(capsys.readouterr().err) == (code != 130)


def test_a_fault_of_ours_is_a_traceback():
    with pytest.raises(ZeroDivisionError):
        programs.exit_code(raising(ZeroDivisionError()))


@pytest.mark.whole
@pytest.mark.parametrize("name", [name for name in programs.names() if name not in ("run", "bench")])
def test_a_flag_that_is_none_ends_with_2_before_torch(name, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import os\nos._exit(77)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-m", f"gpt2_fp8.{name}", "--nonsense"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=120, env=environment)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "usage" in done.stderr or "nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_message_takes_the_place_of_the_bar(monkeypatch):
    written = []
    monkeypatch.setattr(process_end, "redrawn", True)
    monkeypatch.setattr(process_end.os, "isatty", lambda number: True)
    monkeypatch.setattr(process_end.os, "write", lambda number, text: written.append(text))
    process_end.say("\nSIGINT\n")
    assert written == [b"\r\x1b[2KSIGINT\n"]

"""What the programs share: how they end, and what they refuse."""

import os
import re
import subprocess
import sys

import pytest

from gpt2_fp8.config.errors import DataSourceLost, UserError
from gpt2_fp8.runtime import programs
from gpt2_fp8.runtime.programs import source_digest


def test_a_program_ends_with_the_code_of_its_error(capsys):
    def program(error):
        @programs.exit_code
        def main(argv):
            raise error

        return main([])

    errors = {2: UserError.of("no"), 4: DataSourceLost("lost"), 130: KeyboardInterrupt(), 1: OSError(28, "full")}
    for code, error in errors.items():
        assert program(error) == code
        assert bool(capsys.readouterr().err) == (code != 130)
    with pytest.raises(ZeroDivisionError):
        program(ZeroDivisionError())


@pytest.mark.whole
@pytest.mark.parametrize("name", ["export", "prepare", "table"])
def test_a_flag_that_is_none_ends_with_2_before_torch(name, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import os\nos._exit(77)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-m", f"gpt2_fp8.{name}", "--nonsense"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=120, env=environment)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "usage" in done.stderr or "nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_digest_of_the_code_changes_with_a_files_text_name_or_place(tmp_path):
    (tmp_path / "layers").mkdir()
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "layers/k.cu").write_text("int x;")
    seen = {source_digest()}
    for change in (
        lambda: (tmp_path / "layers/k.cu").write_text("int y;"),
        lambda: (tmp_path / "layers/k.cu").rename(tmp_path / "k.cu"),
        lambda: (tmp_path / "b.py").touch(),
        lambda: (tmp_path / "a.py").write_text("x = 2"),
    ):
        change()
        source_digest.cache_clear()
        found = source_digest(tmp_path)
        assert re.fullmatch("[0-9a-f]{12}", found)
        assert found not in seen
        seen.add(found)
    assert source_digest(tmp_path / "gone") is None
    (tmp_path / ".#a.py").symlink_to("me@here.1")  # as an editor leaves
    source_digest.cache_clear()
    assert source_digest(tmp_path) is None

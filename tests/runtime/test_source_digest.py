"""The digest of the code: it changes with a file's text, name or place, and with nothing else."""

import re

from gpt2_fp8.runtime.source_digest import _of, source_digest


def test_it_is_of_every_file_that_computes(tmp_path):
    (tmp_path / "layers").mkdir()
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "layers/k.cu").write_text("int x;")
    first = _of(tmp_path)
    assert re.fullmatch("[0-9a-f]{12}", first)
    (tmp_path / "notes.txt").write_text("not code")
    assert _of(tmp_path) == first
    seen = {first}
    for change in (
        lambda: (tmp_path / "layers/k.cu").write_text("int y;"),
        lambda: (tmp_path / "layers/k.cu").rename(tmp_path / "k.cu"),
        lambda: (tmp_path / "b.py").touch(),
        lambda: (tmp_path / "a.py").write_text("x = 2"),
    ):
        change()
        found = _of(tmp_path)
        assert found not in seen
        seen.add(found)


def test_the_packages_own_is_there():
    assert re.fullmatch("[0-9a-f]{12}", source_digest())


def test_a_package_without_files_to_read_has_none(tmp_path):
    """As one that was installed into an archive."""
    assert _of(tmp_path / "gone") is None

"""docs/glossary.md: every word of the project's own is still in the file that defines it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \| `([\w/.]+)` \|$", re.MULTILINE)


def test_each_word_is_in_the_file_that_defines_it():
    rows = ROW.findall((ROOT / "docs/glossary.md").read_text())
    assert len(rows) > 30
    for word, file in rows:
        stem = word.removeprefix("to ").split(",")[0].split()[0]
        text = (ROOT / "gpt2_fp8" / file).read_text()
        assert re.search(rf"\b{stem}", text, re.IGNORECASE), (word, file)


def test_no_word_is_explained_twice():
    words = [word for word, _ in ROW.findall((ROOT / "docs/glossary.md").read_text())]
    assert len(set(words)) == len(words)


def test_architecture_leads_to_it():
    assert "docs/glossary.md" in (ROOT / "ARCHITECTURE.md").read_text()

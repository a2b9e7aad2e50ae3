"""The project's English: its own words are defined (docs/glossary.md), and sentences of docstrings are short."""

import ast
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


# A break ends a sentence here: a paragraph, an item, an argument's line, a row or a list in the text.
BREAK = re.compile(r"\n\s*\n|\n\s*[-*|] ?|\n(?=\s*[\w.]+(?:, \w+)*[: ] )|(?<=[.:;?!])\s+|`,")
LONGEST = 30  # words; CONTRIBUTING.md asks for 25, of which some are numbers and code


def docstrings():
    for path in sorted((ROOT / "gpt2_fp8").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                yield path.relative_to(ROOT), text


def test_no_sentence_of_a_docstring_is_long():
    texts = list(docstrings())
    assert len(texts) > 1000
    sentences = [(path, sentence) for path, text in texts for sentence in BREAK.split(text)]
    assert [(str(path), text) for path, text in sentences if len(text.split()) > LONGEST] == []

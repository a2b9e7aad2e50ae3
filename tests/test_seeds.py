"""docs/seeds.md: what its tables name exists, its settings compose, its figures are those of the pages they link to."""

import ast
import functools
import re
import shlex
from dataclasses import fields

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import errors
from gpt2_fp8.config.keys import key_paths
from gpt2_fp8.config.schema import RunConfig
from tests.test_readme import ROOT, RUN, anchor, blocks, names

SEEDS = ROOT / "docs/seeds.md"
VERDICTS = "here|partly here|not here yet|refused|held|refuted|out of reach here"
SHOWN = ("here", "partly here", "held")  # verdicts that need something to be seen by
FIGURE = r"(?<![\w.,^-])(?:\d{1,3}(?:,\d{3})+|\d+\.\d+)(?![\w.]*\w)"  # 884,685 or 18.6, and no 124M or 2.20.2


def tables():
    """The cells of every seed's table: claim, here, shown by, verdict."""
    lines = SEEDS.read_text().partition("\n## Seed ")[2].splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [cells for cells in found if not cells[0].startswith("what the seed")]


ROWS = tables()


def test_every_row_has_four_cells_and_a_verdict_of_the_list():
    listed = re.findall(r"^\| ([^|]+) \|[^|]+\|$", SEEDS.read_text().partition("\n## ")[0], re.MULTILINE)[1:]
    assert {word.strip() for row in listed for word in row.replace(" (N)", "").split(",")} == set(VERDICTS.split("|"))
    assert len(ROWS) > 100
    for row in ROWS:
        assert len(row) == 4, row
        assert re.match(rf"({VERDICTS})\b", row[3]), row
        if row[3].startswith(SHOWN):
            assert "::" in row[2] or "](" in row[2], row


def test_what_is_not_here_yet_is_in_the_list_and_the_list_is_of_that():
    missing = SEEDS.read_text().partition("\n## Not here yet")[2].partition("\n## ")[0]
    listed = [int(number) for number in re.findall(r"^(\d+)\. ", missing, re.MULTILINE)]
    assert listed == list(range(1, len(listed) + 1))
    assert {int(number) for row in ROWS for number in re.findall(r"\((\d+)\)", row[3])} == set(listed)
    assert [row for row in ROWS if "not here yet" in row[3] and not re.search(r"not here yet \(\d+\)", row[3])] == []


@functools.cache
def functions(path):
    """The names of the tests in a file."""
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists():
    named = [name for row in ROWS for cell in row for name in names(cell) if "::" in name]
    assert len(named) > 80
    for name in named:
        path, _, function = name.partition("::")
        assert function in functions(path), name


def test_every_setting_of_the_tables_composes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {name for row in ROWS for name in names(row[1]) if all("=" in word for word in name.split())}
    assert len(settings) > 40
    for words in sorted(settings):
        preflight(shlex.split(words))


def test_every_key_of_the_tables_exists():
    groups, known = {field.name for field in fields(RunConfig)}, set(key_paths(RunConfig))
    keys = {name for row in ROWS for name in names(row[1]) if name.partition(".")[0] in groups and "=" not in name}
    assert len(keys) > 3
    assert {key for key in keys if key not in known and key not in groups} == set()


def section(link):
    """The text of a page, or of the section that the link leads to, with those below it."""
    name, _, place = link.partition("#")
    found, inside = [], 0 if place else 1  # the level of the heading that the section begins with
    for line in (SEEDS.parent / name).read_text().splitlines():
        if place and (heading := re.match(r"(#+) (.*)", line)) and not 0 < inside < len(heading[1]):
            inside = len(heading[1]) if anchor(heading[2]) == place else 0
        found += [line] if inside else []
    return "\n".join(found)


def test_figures_are_those_of_the_pages_that_are_linked():
    quoted = 0
    for _, _, shown, _ in ROWS:
        text = "\n".join(section(link) for link in re.findall(r"\]\(([^)]+)\)", shown))
        for figure in re.findall(FIGURE, re.sub(r"`[^`]*`|\]\([^)]*\)", "", shown)):
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d|[.,]\d)", text), (figure, shown)
            quoted += 1
    assert quoted > 40


def test_the_answers_shown_are_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(SEEDS, "text")
    shown = block.strip().split("\n$ ")
    assert len(shown) > 2
    for one in shown:
        typed, _, answer = one.removeprefix("$ ").partition("\n")
        with pytest.raises(errors.UserError) as caught:
            preflight(shlex.split(typed)[len(RUN) :])
        assert str(caught.value) == answer.strip()

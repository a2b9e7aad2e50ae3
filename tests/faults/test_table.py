"""docs/reliability.md: a row for every fault, and in each the files whose tests have its number."""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = (TESTS.parent / "docs/reliability.md").read_text()


def numbered():
    """{fault: {file: how many tests}}."""
    found = defaultdict(lambda: defaultdict(int))
    for path in [*TESTS.glob("faults/test_*.py"), *TESTS.glob("gpu/test_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_(\d{2,3})_", node.name)):
                file = f"{path.parent.name}/{path.stem.removeprefix('test_')}"
                found[int(match[1])][file] += 1
    return found


def test_every_fault_has_its_row_and_its_tests():
    listed = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", TABLE, re.MULTILINE)
    rows = {int(number): cell for number, cell in listed}
    assert len(rows) == len(listed), "a number twice"
    tests = numbered()
    assert set(rows) == set(tests)
    for number, cell in rows.items():
        named = {file: int(count or 1) for file, count in re.findall(r"`([\w/]+)`(?: x (\d+))?", cell)}
        assert named == dict(tests[number]), number
        assert ("not yet" in cell) == (not named), number

"""Programs that tests write as text import modules that exist, which no tool for renaming sees to."""

import ast
import re

from tests.forkserver import ROOT

IMPORT = re.compile(r"from (gpt2_fp8(?:\.\w+)*) import (\w+)|import (gpt2_fp8(?:\.\w+)+)")
# Imports that are to be refused.
WRITTEN_WRONG = {f"tests/{name}.py" for name in ("compat/test_private_parts", "test_layering", "test_written_programs")}
FILES = [path for path in sorted((ROOT / "tests").rglob("*.py")) if str(path.relative_to(ROOT)) not in WRITTEN_WRONG]


def names_of(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.If):  # TYPE_CHECKING: names that are imported when they are asked for
            yield from (alias.asname or alias.name for inside in node.body for alias in getattr(inside, "names", ()))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def unknown(path):
    """The modules of ours that strings in the file import, and that are not there."""
    strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    for text in filter(lambda value: isinstance(value, str), strings):
        for module, name, plain in IMPORT.findall(text):
            place = ROOT.joinpath(*(module or plain).split("."))
            if place.is_dir():
                below = (place / name).is_dir() or (place / f"{name}.py").is_file()
                found = not name or below or name in names_of(place / "__init__.py")
            else:
                found = place.with_suffix(".py").is_file()
            if not found:
                yield f"{module or plain}: {name}"


def test_their_imports_exist():
    assert [f"{path.relative_to(ROOT)}: {name}" for path in FILES for name in unknown(path)] == []

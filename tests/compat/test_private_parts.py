"""Nothing outside of `gpt2_fp8/compat` touches what another library keeps to itself."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gpt2_fp8"
COMPAT = sorted(path for path in (PACKAGE / "compat").glob("*.py") if path.name != "__init__.py")
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "compat"]

NOT_PRIVATE = {"_replace", "_asdict", "_fields"}  # of named tuples, whose documentation has them
# Private to others although nothing in their names says so.
UNDOCUMENTED = {
    # Lightning
    *("epoch_loop", "batch_progress", "manual_optimization", "optim_step_progress", "procs"),
    *("ExperimentWriter", "rank_zero_experiment"),
    # torch
    *("distributed_c10d", "found_inf"),
    # Transformer Engine
    *("FP8GlobalStateManager", "init_fp8_metadata", "quantization_state", "SplitAlongDim", "apply_rotary_pos_emb"),
    *("is_fp8_enabled", "get_fp8_recipe", "get_autocast_state", "set_autocast_state", "fp8_tensors_recompute_buffer"),
}


def private(name):
    return name.startswith("_") and not name.startswith("__")


def foreign(module):
    """Whether a module is another library's: neither ours nor Python's, whose `os._exit` is documented."""
    package = module.partition(".")[0]
    return package != "gpt2_fp8" and package not in sys.stdlib_module_names


def of_self(attribute):
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def own_names(tree):
    """What a module defines with an underscore: `self._x`, functions, classes, variables."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            names.add(node.attr)
    return names


def root(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def touched(source):
    """Each private part of another library that a module's source names, as `line: part`."""
    tree, found = ast.parse(source), []
    own = own_names(tree)
    libraries, pythons = set(), set()  # names that mean a library's module, and one of Python's
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, (alias.asname or alias.name).partition(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            (libraries if foreign(module) else pythons).add(name)
            if foreign(module) and any(private(part) or part in UNDOCUMENTED for part in module.split(".")):
                found.append(f"{node.lineno}: {module}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name, of = node.attr, root(node)
        elif isinstance(node, ast.Call) and root(node.func) in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
            name, of = getattr(node.args[1], "value", ""), root(node.args[0])
        else:
            continue
        ours = of in pythons - libraries or (of not in libraries and name in own) or name in NOT_PRIVATE
        if (isinstance(name, str) and private(name) and not ours) or name in UNDOCUMENTED:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def module_name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def test_private_parts_of_libraries_are_used_in_compat_alone():
    assert [f"{module_name(path)}:{line}" for path in MODULES for line in touched(path.read_text())] == []


SEEN = [
    ("import torch\ntorch.ops.aten._scaled_mm(1)", "torch.ops.aten._scaled_mm"),
    ("from lightning.pytorch.loggers.csv_logs import ExperimentWriter", "ExperimentWriter"),
    ("def f(trainer):\n    return trainer.fit_loop.epoch_loop", "trainer.fit_loop.epoch_loop"),
    ("def f(optimizer):\n    optimizer.found_inf = 1", "optimizer.found_inf"),
    ("def f(trainer):\n    trainer._build()", "trainer._build"),  # though a class of ours has a `_build`
]


def test_a_private_part_is_seen():
    for source, part in SEEN:
        assert any(part in found for found in touched(source)), part


def pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everything = [
        *project["dependencies"],
        *(pin for extra in project["optional-dependencies"].values() for pin in extra),
    ]
    return {re.match(r"[\w-]+", pin)[0]: re.sub(r"\[.*?\]", "", pin) for pin in everything}


def test_each_file_says_which_versions_it_holds_for():
    """The very pin: whoever moves it comes here, and tries the contract tests first."""
    for path in COMPAT:
        said = re.search(r"[Hh]olds for\s+`([\w-]+)([^`]*)`", ast.get_docstring(ast.parse(path.read_text())) or "")
        assert said, f"{path}: `Holds for` and a version is missing in the docstring"
        assert said[1] + said[2] == pins()[said[1]]


def test_each_public_name_has_a_reason_and_a_contract_test():
    tests = "".join(p.read_text() for p in [*Path(__file__).parent.glob("*.py"), ROOT / "tests/gpu/test_compat.py"])
    for path in COMPAT:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not private(node.name):
                assert ast.get_docstring(node), f"{path.name}: {node.name}"
                assert re.search(rf"\b{node.name}\b", tests), f"{path.name}: {node.name}"

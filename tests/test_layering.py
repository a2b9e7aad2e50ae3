"""The house in one table: which module may import which, and which packages. Read it from the bottom up.

A name stands for a module, or for a package and all in it that has no row of its own. `imports` are modules of ours,
`packages` are other people's; the standard library is open to all, and a row's own modules to each other where the row
names itself. Arrows point downwards only: a row may import rows that come after it. A new module gets its row here.
"""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "gpt2_fp8"


class Row(NamedTuple):
    imports: str
    packages: str = ""


PARTS = (
    "module callbacks loggers report data precision checkpoint engine step sampling optim loss model flops layers rng "
    "config"
)

HOUSE = {
    # the entry and the other programs: each a file, none knows another
    "run": Row("compose config loading signals slurm speech", "hydra omegaconf"),
    **dict.fromkeys(
        ("doctor", "compare", "generate", "evaluate", "export", "plot_schedule"),
        Row(
            f"compose train build startup {PARTS}",
            "hydra omegaconf torch lightning numpy safetensors matplotlib tiktoken",
        ),
    ),
    # from settings to checked settings, before torch is there
    "compose": Row("compose config", "hydra omegaconf yaml"),
    # measuring: the benchmark, what it runs in child processes, and what `precision=auto` decides by
    "bench": Row("speech signals compose startup measure measure.record measure.room measure.sections config"),
    "measure.sections": Row("measure measure.record config"),
    "measure.record": Row("measure measure.plot checkpoint config"),
    "measure.plot": Row("measure", "matplotlib"),
    "measure.worker": Row(
        "build startup measure measure.profile measure.room measure.versions precision engine memory step optim model "
        "flops data config",
        "torch",
    ),
    "measure.peers": Row("measure measure.timing measure.peer_models optim config", "torch"),
    "measure.peer_models": Row(
        "measure.timing layers loss model precision config", "torch lightning transformer_engine"
    ),
    "measure.gemm": Row("measure measure.timing model precision config", "torch"),
    "measure.attention": Row("measure measure.timing layers config", "torch"),
    # what puts a run together
    "loading": Row("train report limits signals slurm config"),
    "train": Row(f"spool build startup measure.auto process outcome ending recovery ladder {PARTS}", "torch"),
    "ending": Row(f"build process outcome {PARTS}"),
    "outcome": Row(f"build kernels ladder {PARTS}", "torch"),
    "process": Row("precision speech", "torch lightning"),
    "recovery": Row("ladder checkpoint", "torch"),
    "measure.auto": Row("measure measure.candidates measure.cache precision checkpoint config"),
    "measure.candidates": Row("measure measure.cache measure.versions kernels.nvrtc precision config", "torch"),
    "measure.cache": Row("measure precision checkpoint config"),
    "measure.timing": Row("measure measure.room memory", "torch"),
    "measure.profile": Row("measure", "torch"),
    "measure.versions": Row("kernels", "torch"),
    "measure.room": Row("measure flops limits config"),
    "measure": Row("spool measure config"),
    "build": Row(f"startup kernels {PARTS}", "torch lightning"),
    "startup": Row("checkpoint precision footprint memory model layers.chosen flops config", "torch"),
    "footprint": Row("limits memory model flops config"),
    # what Lightning calls
    "module": Row(
        "resume attempts engine step sampling optim model flops precision checkpoint rng signals config",
        "torch lightning",
    ),
    "callbacks": Row(
        "ladder stragglers exchange memory signals slurm checkpoint sampling model flops precision config",
        "torch lightning",
    ),  # not each other
    "data.datamodule": Row("data exchange signals config", "torch lightning tiktoken"),
    "precision.plugin": Row("precision exchange config", "torch lightning transformer_engine"),
    "checkpoint.io": Row("checkpoint", "lightning"),
    "loggers": Row("rows checkpoint config", "lightning"),
    "rows": Row("checkpoint"),
    "report": Row("checkpoint config"),
    # a run's files
    "checkpoint": Row("checkpoint config", "torch safetensors"),
    # one optimizer step, in plain torch
    "ladder": Row("step config"),
    "resume": Row("optim checkpoint config", "torch"),
    "stragglers": Row(""),
    "attempts": Row("engine memory exchange signals", "torch"),
    "memory": Row("exchange config", "torch"),
    "engine": Row("compiling graphs bf16 step loss model layers precision config", "torch"),
    "bf16": Row("step loss model layers config", "torch"),
    "compiling": Row("", "torch"),
    "graphs": Row("precision", "torch"),
    "step": Row("exchange", "torch"),
    "sampling": Row("", "torch"),
    "optim": Row("config", "torch"),
    "loss": Row("kernels", "torch"),
    "precision": Row("precision layers exchange config", "torch transformer_engine"),
    # the text
    "data": Row(
        "spool data exchange signals config",
        "torch numpy pyarrow datasets huggingface_hub tiktoken requests zstandard fsspec",
    ),
    # the model
    "model": Row("layers config", "torch"),
    "flops": Row("config"),
    "layers.te": Row("", "torch transformer_engine"),
    "layers.fused_family": Row("layers layers.te layers.fused config", "torch"),
    "layers.fused": Row("layers layers.attention kernels config", "torch"),
    "layers.chosen": Row("layers.attention kernels kernels.nvrtc"),
    "layers.attention": Row("layers layers.te", "torch flash_attn"),
    "layers": Row("layers kernels config", "torch"),
    "kernels.nvrtc": Row("", "torch cuda"),
    "kernels": Row("kernels kernels.nvrtc", "torch triton"),
    "rng": Row("exchange", "torch numpy"),
    # what everything stands on
    "exchange": Row("", "torch"),
    "signals": Row("slurm"),
    "speech": Row("streams config"),
    "streams": Row(""),
    "spool": Row(""),
    "limits": Row(""),
    "slurm": Row("config"),
    "config": Row("config"),
}

# Imported where it is used and nowhere else, so that everything imports, and shows its help, on a laptop.
INSIDE_FUNCTIONS = {
    *("transformer_engine", "flash_attn", "cuda", "matplotlib"),
    *("datasets", "huggingface_hub", "tiktoken", "pyarrow", "requests"),
}
# Nothing that these import, itself or through others, takes longer than a moment.
BEFORE_TORCH = ["config", "compose", "run", "loading", "limits", "report", "signals", "slurm", "speech", "streams"]


class Import(NamedTuple):
    name: str  # gpt2_fp8.x.y, or a package's own name
    line: int
    at_top: bool


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:  # the package itself holds the version
            yield name, path


MODULES = dict(modules())


def row_of(module):
    """The longest name in the table that the module is, or is in."""
    names = [name for name in HOUSE if module == name or module.startswith(name + ".")]
    return max(names, key=len, default=None)


def imports(path):
    tree = ast.parse(path.read_text())
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    } | typing_only
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            module = node.module or ""
            ours = module == "gpt2_fp8" or module.startswith("gpt2_fp8.")
            names = [f"{module}.{alias.name}" if ours else module for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, node not in inside)


def target(name):
    """The module of ours that an import means: `gpt2_fp8.data.files.FilesSource` is in `data.files`."""
    name = name.removeprefix("gpt2_fp8").lstrip(".")
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def violations(module, path):
    row_name = row_of(module)
    if row_name is None:
        return [f"{module} has no row in HOUSE"]
    row, found = HOUSE[row_name], []
    for name, line, at_top in imports(path):
        package = name.partition(".")[0]
        if package == "gpt2_fp8":
            goal = target(name)
            # its own package's __init__, which names what is in the package, and the version are open to all
            allowed = not goal or row_of(goal) in row.imports.split() or goal == module.rpartition(".")[0]
            # a row above may also import a module that has a row of its own in a package that it may import
            allowed = allowed or any(goal.startswith(f"{part}.") for part in _beyond_own_package(row, row_name))
        else:
            allowed = package in sys.stdlib_module_names or package in row.packages.split()
            if allowed and at_top and package in INSIDE_FUNCTIONS:
                found.append(f"{module}:{line} imports {package} at its top")
        if not allowed:
            found.append(f"{module}:{line} may not import {name}")
    return found


def _beyond_own_package(row, row_name):
    """The packages of others that a row may import whole: `train` may import precision.plugin, precision may not."""
    return [name for name in row.imports.split() if name.partition(".")[0] != row_name.partition(".")[0]]


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_what_the_house_allows(module):
    assert violations(module, MODULES[module]) == []


def test_arrows_point_one_way():
    """No two rows import each other, by any way round."""
    rows = {name: [r for r in row.imports.split() if r != name] for name, row in HOUSE.items()}
    done: set[str] = set()

    def visit(name, above):
        assert name not in above, " -> ".join([*above, name])
        if name not in done:
            for below in rows[name]:
                visit(below, [*above, name])
            done.add(name)

    for name in rows:
        visit(name, [])


@pytest.mark.parametrize("package", ["hydra", "lightning", "transformer_engine"])
def test_the_table_says_where_the_big_packages_live(package):
    """What ARCHITECTURE.md promises, read from the table: a row that gains one of these is a decision, not a detail."""
    programs = {"run", "doctor", "compare", "generate", "evaluate", "export", "plot_schedule"}
    promised = {
        "hydra": programs | {"compose"},
        "lightning": programs - {"run"}
        | {
            "process",
            "build",
            "module",
            "callbacks",
            "data.datamodule",
            "precision.plugin",
            "checkpoint.io",
            "loggers",
            "measure.peer_models",
        },
        "transformer_engine": {"layers.te", "precision", "precision.plugin", "measure.peer_models"},
    }
    assert {name for name, row in HOUSE.items() if package in row.packages.split()} == promised[package]


def test_config_is_standard_library_only():
    assert HOUSE["config"] == Row("config")


@pytest.mark.parametrize("module", BEFORE_TORCH)
def test_imports_without_torch(module):
    names = [f"gpt2_fp8.{name}" for name in MODULES if name == module or name.startswith(f"{module}.")]
    program = f"import sys, {', '.join(names)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "lightning", "numpy", "transformer_engine"}
    assert not (heavy | {"hydra", "omegaconf", "yaml"} if module == "config" else heavy) & set(loaded)


WRONG = {
    "config.x": ("import torch", "may not import torch"),
    "config.y": ("def f():\n    import omegaconf", "may not import omegaconf"),
    "step": ("from gpt2_fp8 import module", "may not import gpt2_fp8.train.module"),
    "model": ("from gpt2_fp8.data.files import FilesSource", "may not import gpt2_fp8.data.files"),
    "layers.te": ("import transformer_engine.pytorch as te", "at its top"),
    "callbacks.tiers": ("from gpt2_fp8.callbacks.samples import Samples", "may not import gpt2_fp8.callbacks.samples"),
    "precision.recipes": ("from gpt2_fp8.precision import plugin", "may not import gpt2_fp8.precision.plugin"),
    "data.files": ("import lightning", "may not import lightning"),
    "novelty": ("", "has no row"),
}


@pytest.mark.parametrize("module", WRONG)
def test_a_wrong_import_is_seen(module, tmp_path):
    source, message = WRONG[module]
    (tmp_path / "wrong.py").write_text(source)
    (found,) = violations(module, tmp_path / "wrong.py")
    assert message in found


RIGHT = {
    "train": "from gpt2_fp8.precision.plugin import build_plugin",
    "callbacks.tiers": "from gpt2_fp8.checkpoint import files\nfrom gpt2_fp8 import __version__",
    "layers.te": "def f():\n    import transformer_engine.pytorch as te",
    "config.checks": "import math\nfrom gpt2_fp8.config.errors import Problem",
}


@pytest.mark.parametrize("module", RIGHT)
def test_a_right_import_is_let_pass(module, tmp_path):
    (tmp_path / "right.py").write_text(RIGHT[module])
    assert violations(module, tmp_path / "right.py") == []

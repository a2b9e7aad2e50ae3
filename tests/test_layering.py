"""The house in one table, read from the bottom up: which package may import which, and which of other people's."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "gpt2_fp8"


class Row(NamedTuple):
    imports: str
    packages: str = ""


HOUSE = {
    # programs: each a file, none knows another
    "__main__": Row("config runtime"),
    "run": Row("compose config train reports runtime", "hydra omegaconf"),
    "bench": Row("checkpoint compose config measure runtime"),
    "export": Row("config train runtime"),
    "table": Row("config reports runtime"),
    "compare": Row("checkpoint config reports runtime"),
    "schedule": Row("compose config engine train runtime", "matplotlib"),
    "prepare": Row("compose config data runtime"),
    "tokenizer": Row("compose config data runtime"),
    "doctor": Row("measure runtime config"),
    "generate": Row("compose config train runtime"),
    "import_hf": Row("compose config train runtime"),
    "evaluate": Row("compose config train runtime", "hydra"),
    # what runs have left, read again
    "reports": Row("train checkpoint config", "matplotlib markdown_it numpy yaml"),
    # a run under Lightning
    "train": Row(
        "callbacks engine fp8 model data compat checkpoint kernels runtime config",
        "torch lightning numpy safetensors filelock tensorboard wandb mlflow yaml",
    ),
    "callbacks": Row("engine model compat checkpoint runtime config", "torch lightning rich"),
    # the benchmark, and the facts of a machine
    "measure": Row(
        "engine fp8 model data checkpoint kernels compose runtime compat config",
        "torch lightning transformer_engine",
    ),
    # one optimizer step
    "engine": Row("fp8 model kernels runtime compat config", "torch"),
    # how a model is computed
    "fp8": Row("model layers kernels runtime compat config", "torch transformer_engine torchao"),
    "model": Row("layers kernels config", "torch"),
    # the text
    "data": Row(
        "runtime compat config", "torch lightning numpy pyarrow datasets huggingface_hub tiktoken tokenizers requests"
    ),
    # what a backend is made of
    "layers": Row("kernels compat config", "torch transformer_engine"),
    "kernels": Row("compat", "torch triton cuda"),
    # a run's files
    "checkpoint": Row("runtime config", "torch safetensors"),
    # from settings to checked settings, before torch is there
    "compose": Row("runtime compat config", "hydra omegaconf yaml joblib submitit"),
    # what everything stands on
    "runtime": Row("compat config", "torch numpy filelock"),
    # what is private in other libraries: it knows nothing of this one
    "compat": Row("", "torch lightning transformer_engine torchao flash_attn hydra omegaconf"),
    "config": Row("", "huggingface_hub"),
}
# Where a package that its row lets in may be: it decides how a part is tried without the whole.
ONLY_IN = {
    "lightning": ["train", "callbacks", "compat", "data.datamodule"],
    "transformer_engine": ["fp8", "layers.te", "compat.transformer_engine", "measure.machine"],
    "torchao": ["fp8.recipes", "compat.torchao"], "flash_attn": ["compat.flash_attn"],
    "huggingface_hub": ["data", "config.tokenizer_file"], "tokenizers": ["data.tokenizer", "data.tokenizer_training"],
    "cuda": ["kernels.nvrtc"], "matplotlib": ["reports.render", "schedule"],
    "yaml": ["compose", "reports.sweep", "train.loggers"], "mlflow": ["train.services"], "wandb": ["train.services"],
    "tensorboard": ["train.loggers"], "rich": ["callbacks.progress"],
    "hydra": ["run", "evaluate", "compose", "compat.hydra_private"], "joblib": ["compose.sweeps"],
    "submitit": ["compose.sweeps"],
}  # fmt: skip

EVERYWHERE = sys.stdlib_module_names | {"typing_extensions"}  # `typing` of later Pythons
# Imported where it is used and nowhere else, so that everything imports, and shows its help, on a laptop.
INSIDE_FUNCTIONS = {
    *("transformer_engine", "torchao", "flash_attn", "cuda", "matplotlib"),
    *("datasets", "huggingface_hub", "tiktoken", "tokenizers", "pyarrow", "requests", "filelock"),
    *("wandb", "mlflow", "tensorboard", "joblib", "submitit"),
}
# Nothing that these import, itself or through others, takes longer than a moment.
BEFORE_TORCH = [
    *("config", "compose", "__main__", "run", "bench", "export", "table", "compare", "schedule", "prepare", "doctor"),
    *("tokenizer", "generate", "import_hf", "evaluate", "train.launch", "train.run_end", "train.sweep_job"),
    *("compat.hydra_private", "runtime.ranks", "runtime.signals", "runtime.gpu_locks"),
    *("runtime.slurm", "runtime.programs"),
]


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
    """The name in the table of the package that a module is in, or of the program that it is; None without a row."""
    name = module.partition(".")[0]
    return name if name in HOUSE else None


@functools.cache
def imports(path):
    tree = ast.parse(path.read_text())
    inside = {
        node
        for block in ast.walk(tree)
        if isinstance(block, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        or (isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test))
        for node in ast.walk(block)
    }
    found = []
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
        found += [Import(name, node.lineno, node not in inside) for name in names]
    return found


def target(name):
    """The module of ours that an import means: `gpt2_fp8.data.files.FilesSource` is in `data.files`."""
    name = name.removeprefix("gpt2_fp8").lstrip(".")
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def violations(module, path):
    own = row_of(module)
    if own is None:
        return [f"{module} has no row in HOUSE"]
    row, found = HOUSE[own], []
    for name, line, at_top in imports(path):
        package = name.partition(".")[0]
        if package == "gpt2_fp8":
            goal = target(name)
            allowed = not goal or row_of(goal) in row.imports.split() or (row_of(goal) == own and own != "callbacks")
        else:
            allowed = package in EVERYWHERE or package in row.packages.split()
            allowed = allowed and any(f"{module}.".startswith(f"{place}.") for place in ONLY_IN.get(package, [module]))
            if allowed and at_top and package in INSIDE_FUNCTIONS:
                found.append(f"{module}:{line} imports {package} at its top")
        if not allowed:
            found.append(f"{module}:{line} may not import {name}")
    return found


def test_imports_only_what_the_house_allows():
    assert [line for module, path in MODULES.items() for line in violations(module, path)] == []


def test_the_table_is_read_from_the_bottom_up():
    rows = list(HOUSE)
    for place, row in enumerate(HOUSE.values()):
        assert set(row.imports.split()) <= set(rows[place + 1 :])


def test_the_root_holds_programs_and_packages():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert len(packages) <= 17
    programs = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert packages | programs == set(HOUSE)
    for program in programs:
        assert 'if __name__ == "__main__"' in MODULES[program].read_text()


def test_no_modules_import_each_other_in_a_circle():
    """Also not within a package, by any way round, nor for a type's sake."""
    arrows = {
        name: {target(i.name) for i in imports(path) if i.name.startswith("gpt2_fp8.")} - {"", name}
        for name, path in MODULES.items()
    }
    graphlib.TopologicalSorter(arrows).prepare()  # raises CycleError, which names the circle


@pytest.mark.whole
def test_imports_without_torch():
    def loaded(*parts):
        names = [f"gpt2_fp8.{name}" for name in MODULES if any(f"{name}.".startswith(f"{part}.") for part in parts)]
        program = f"import sys, {', '.join(names)}; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return {"torch", "lightning", "numpy", "transformer_engine", "hydra", "omegaconf", "yaml"} & set(
            done.stdout.split()
        )

    assert loaded("config") == set()
    assert loaded(*BEFORE_TORCH) <= {"hydra", "omegaconf", "yaml"}

"""Does this tree compute the very numbers of an earlier commit? For changes that should change none.

    python -m tests.same_numbers COMMIT

Both trees train the same small runs on the CPU, side by side: three legs in one process each for every precision that
runs there, two ranks, and a run of the earlier tree that this one continues. Steps' token hashes and losses, logged
values, and all saved tensors must be equal to the last bit. So must the saved state, once its keys have the present
names (`checkpoint/files.py`), and models their options.
Ends with 1 and the first differences if they are not.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from gpt2_fp8.checkpoint.files import upgrade
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.train.trained import with_defaults

HERE = Path(__file__).resolve().parents[1]
ONE = {
    "fp32": ["precision=fp32"],
    "bf16": ["precision=bf16"],
    "fp8, fallen back": ["precision=fp8_hybrid"],
    "dropout, recomputed": ["precision=bf16", "model.dropout=0.1", "activation_checkpointing=mlp"],
    "compiled": ["precision=bf16", "compile=true"],
    **{
        f"emulated {recipe}": ["precision=fp8_hybrid", "precision.backend=emulated", f"recipe={recipe}"]
        for recipe in ("delayed", "current", "block")
    },
}
ON_TWO_RANKS = ("fp32", "bf16", "fp8, fallen back", "emulated delayed")
LEGS = """
import json, sys, pytest
from tests.runs import record_steps, train, train_until
folder, words = sys.argv[1], sys.argv[2:]
with pytest.MonkeyPatch.context() as patch:
    steps = record_steps(patch)
    train_until(4, folder, *words)
    train_until(8, folder, "ckpt_path=last", *words)
    train(folder, "ckpt_path=last", *words)
print("STEPS", json.dumps(steps))
"""
BEGUN = """
import sys
from tests.runs import train_until
train_until(4, sys.argv[1], *sys.argv[2:])
"""
TWO_RANKS = """
import json, sys, pytest
from tests.runs import record_steps, train
if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        steps = record_steps(patch)
        train(sys.argv[1], *sys.argv[2:])
    print("STEPS", json.dumps(steps), flush=True)
"""
TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.val_check_interval=4"]
TIMES = {"tokens_per_second", "step_time", "data_wait", "memory_gb"}  # and what a process happens to hold
NEW = {"hyper_parameters", "config", "optimizer"}  # keys of the state that only later trees write


def run(tree: Path, folder: Path, *command: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    out = (folder / "out").open("w")
    return subprocess.Popen([sys.executable, *command], cwd=tree, env=environment, stdout=out, stderr=out, text=True)


def of_three_legs(tree: Path, folder: Path, words: list[str]) -> subprocess.Popen[str]:
    return run(tree, folder, "-c", LEGS, str(folder / "run"), *words)


def of_two_ranks(tree: Path, folder: Path, words: list[str]) -> subprocess.Popen[str]:
    """Start a run of two processes. Lightning starts the second one from the same file, so it has to be one."""
    program = folder / "two_ranks.py"
    program.write_text(TWO_RANKS)
    return run(tree, folder, str(program), str(folder / "run"), *TWO, *words)


def found(folder: Path) -> dict[str, Any]:
    """Return all that must be equal of a run, by name: values, and bytes of tensors."""
    steps = [line for line in (folder / "out").read_text().splitlines() if line.startswith("STEPS")]
    result: dict[str, Any] = {"steps": sorted(steps)}  # of every rank
    with (folder / "run" / "metrics.csv").open() as file:
        result["log"] = [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]
    for path in sorted((folder / "run" / "checkpoints").glob("step-*")):
        state = upgrade(json.loads((path / "state.json").read_text()))
        state.setdefault("training_step", {}).setdefault("scaling", {})
        state["callbacks"].pop("TimeLimit", None)  # a time
        state["model"] = with_defaults(ModelConfig, state["model"])
        result[f"{path.name}/state"] = {key: value for key, value in state.items() if key not in NEW}
        for file in sorted(path.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                result[f"{path.name}/{file.name}/{name}"] = (str(tensor.dtype), tensor.numpy().tobytes())
    return result


def of_a_continued_run(before: Path, folder: Path) -> subprocess.Popen[str]:
    """Start a run in this tree that continues from a checkpoint of the earlier one, which it has to read."""
    words = [str(folder / "run"), *ONE["fp32"]]
    if code := run(before, folder, "-c", BEGUN, *words).wait():
        raise SystemExit(f"the earlier tree ended with {code}: {(folder / 'out').read_text()[-2000:]}")
    go_on = "import sys; from tests.runs import train; train(sys.argv[1], 'ckpt_path=last', *sys.argv[2:])"
    return run(HERE, folder, "-c", go_on, *words)


def differences(one: Any, other: Any, name: str) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return [d for key in keys for d in differences(one.get(key), other.get(key), f"{name}/{key}")]
    return [] if one == other else [f"{name}: {str(one)[:80]} != {str(other)[:80]}"]


def main(commit: str) -> int:
    wrong: list[str] = []
    whole: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        before = Path(place) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", str(before), commit], cwd=HERE, check=True)
        try:
            cases = [(name, of_three_legs, words) for name, words in ONE.items()]
            cases += [(f"two ranks, {name}", of_two_ranks, ONE[name]) for name in ON_TWO_RANKS]
            for number, (name, start, words) in enumerate(cases):
                folders = [Path(place) / f"{number}-{side}" for side in ("before", "now")]
                for folder in folders:
                    folder.mkdir()
                started = [start(tree, folder, words) for tree, folder in zip((before, HERE), folders, strict=True)]
                codes = [process.wait() for process in started]
                if any(codes):
                    wrong.append(f"{name}: ended with {codes}: {(folders[codes[0] == 0] / 'out').read_text()[-2000:]}")
                    continue
                results = [found(folder) for folder in folders]
                whole = whole or results[1]
                own = differences(*results, name)
                ranks = 2 if start is of_two_ranks else 1
                if any(len(result["steps"]) != ranks or len(result) < 100 for result in results):
                    own.append(f"{name}: the steps of {ranks} ranks and their checkpoints were not all found")
                print(f"{name}: {len(results[1])} things compared, {len(own)} differ", flush=True)
                wrong += own
            (last := Path(place) / "continued").mkdir()
            if code := of_a_continued_run(before, last).wait():
                wrong.append(f"a continued run ended with {code}: {(last / 'out').read_text()[-2000:]}")
            else:
                own = differences(whole | {"steps": []}, found(last), "continued from the earlier tree's checkpoint")
                print(f"continued from the earlier tree's checkpoint: {len(own)} differ", flush=True)
                wrong += own
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=HERE, check=True)
    print(*wrong[:40], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

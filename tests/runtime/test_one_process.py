"""Programs that are one process: what has started several of them is told so, once, before torch is imported."""

import os
import subprocess
import sys

import pytest

from gpt2_fp8.runtime import programs
from gpt2_fp8.runtime.one_process import refusal
from tests.runtime.test_launcher import ALONE, BATCH_SCRIPT, BY_HAND, LIGHTNINGS, SRUN, TORCHRUN

NAMES = [name for name in programs.names() if name != "run"]
ONE_A_NODE = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
ONE = {
    "a terminal": {},
    "a batch script of eight tasks": BATCH_SCRIPT,
    "srun of one task": SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "torchrun of one": ALONE | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    "a container's leftovers": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    "half of them": {"WORLD_SIZE": "2"},
    "a process of Lightning's": LIGHTNINGS,
    "mpirun of one": {"OMPI_COMM_WORLD_SIZE": "1"},
}
SEVERAL = {
    "torchrun": (TORCHRUN, "torchrun has started 8", "python -m gpt2_fp8.table 'a b', without torchrun; if the"),
    "accelerate": (
        TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"},
        "accelerate launch has started 8",
        "python -m gpt2_fp8.table 'a b', without accelerate launch; if the",
    ),
    "srun": (SRUN, "srun has started 8", "srun --ntasks 1 python -m gpt2_fp8.table 'a b'"),
    "a task a node": (ONE_A_NODE, "srun has started 2", "srun --ntasks 1 python -m gpt2_fp8.table 'a b'"),
    "variables": (
        BY_HAND,
        "RANK and WORLD_SIZE say 2",
        "unset RANK WORLD_SIZE LOCAL_RANK; python -m gpt2_fp8.table 'a b'",
    ),
    "mpirun": ({"PMI_SIZE": "4"}, "mpirun has started 4", "python -m gpt2_fp8.table 'a b', without mpirun"),
}


@pytest.mark.parametrize("case", ONE)
def test_one_process_is_one(case):
    assert refusal("table", [], ONE[case]) is None


@pytest.mark.parametrize("case", SEVERAL)
def test_several_are_told_how_to_start_one(case):
    environment, said, remedy = SEVERAL[case]
    problem = refusal("table", ["a b"], environment)
    assert problem is not None
    assert problem.cause == f"table is one process, and {said}"
    assert problem.remedy.startswith(remedy)


@pytest.mark.parametrize("case", SEVERAL)
def test_the_remedy_is_not_refused(case):
    """`unset NAMES` takes the variables away by which the launcher is recognised."""
    environment, _, _ = SEVERAL[case]
    remedy = refusal("table", [], environment).remedy
    if "unset " in remedy:
        names = remedy.partition("unset ")[2].partition(";")[0].split()
        assert refusal("table", [], {k: v for k, v in environment.items() if k not in names}) is None


def test_what_is_about_a_machine_runs_once_on_each():
    assert refusal("doctor", [], ONE_A_NODE, once_a_node=True) is None
    problem = refusal("doctor", [], SRUN, once_a_node=True)
    assert problem.remedy == "srun --ntasks-per-node 1 python -m gpt2_fp8.doctor"


@pytest.mark.whole
@pytest.mark.parametrize("name", NAMES)
def test_every_program_refuses_to_be_several(name, tmp_path):
    """Where importing torch fails: it is not needed to say so."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"gpt2_fp8.{name}", "word"],
            cwd=tmp_path, env=os.environ | BY_HAND | {"RANK": rank, "LOCAL_RANK": rank}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in "01"
    ]  # fmt: skip
    ends = [(*process.communicate(timeout=60), process.returncode) for process in processes]
    said = (
        f"error: {name} is one process, and RANK and WORLD_SIZE say 2\n"
        f"  fix: unset RANK WORLD_SIZE LOCAL_RANK; python -m gpt2_fp8.{name} word\n"
    )
    assert ends == [("", said, 2), ("", "", 2)]


@pytest.mark.whole
def test_the_help_is_said_once(tmp_path):
    ends = [
        subprocess.run(
            [sys.executable, "-m", "gpt2_fp8.table", "--help"],
            cwd=tmp_path, env=os.environ | BY_HAND | {"RANK": rank, "LOCAL_RANK": rank}, text=True, capture_output=True,
            timeout=60, check=True,
        ).stdout
        for rank in "01"
    ]  # fmt: skip
    assert "FOLDER" in ends[0]
    assert ends[1] == ""

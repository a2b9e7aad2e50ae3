"""Variables that a notebook or a shell has left, and OpenMP's: what programs of ours change, and a library keeps."""

import os
import re
import subprocess
import sys

import pytest

from tests.data.hub_runs import ROOT
from tests.runs import SMALL, command

pytestmark = pytest.mark.whole
INLINE = {
    "PYTHONPATH": str(ROOT),
    "MPLBACKEND": "module://not_installed_here.backend_inline",
}


def test_a_run_of_a_notebooks_shell_needs_no_window_of_matplotlibs(tmp_path):
    done = command(*SMALL, "trainer.max_steps=1", "optim.warmup_steps=0", "run_name=r", cwd=tmp_path, **INLINE)
    assert (done.returncode, done.stderr) == (0, "")


def test_lightnings_variables_change_nothing_of_a_run(tmp_path):
    lightnings = {"PYTHONPATH": str(ROOT), "PL_TRAINER_LIMIT_TRAIN_BATCHES": "0", "PL_TRAINER_GRADIENT_CLIP_VAL": "0.5"}
    done = command(*SMALL, "trainer.max_steps=2", "optim.warmup_steps=0", "run_name=r", cwd=tmp_path, **lightnings)
    assert (done.returncode, done.stderr) == (0, "")
    assert "completed 2 steps" in done.stdout


@pytest.mark.parametrize(("policy", "spins"), [({}, "0"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")])
def test_threads_of_openmp_wait_asleep_unless_the_user_says_otherwise(tmp_path, policy, spins):
    """As libgomp itself says when torch loads it, in the run and in the processes that read its text."""
    words = ["trainer.max_steps=1", "optim.warmup_steps=0", "data.num_workers=1", "run_name=r"]
    done = command(*SMALL, *words, cwd=tmp_path, PYTHONPATH=str(ROOT), OMP_DISPLAY_ENV="verbose", **policy)
    assert done.returncode == 0
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)) == {spins}


@pytest.mark.parametrize("words", [["run", "--version"], ["table", "--help"]])
def test_a_program_forgets_the_window_for_what_it_starts_too(words, monkeypatch, tmp_path):
    code = (
        "import atexit, os, runpy, sys; atexit.register(lambda: "
        "print('left', 'MPLBACKEND' in os.environ, os.environ['OMP_WAIT_POLICY'])); "
        "sys.argv[:] = sys.argv[1:]; runpy.run_module('gpt2_fp8', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "gpt2_fp8", *words],
        cwd=tmp_path, text=True, capture_output=True, env=os.environ | INLINE ,
    )  # fmt: skip
    assert done.stdout.endswith("left False passive\n"), done.stderr


def test_who_imports_the_package_keeps_the_environment(tmp_path):
    code = (
        "import os, gpt2_fp8; gpt2_fp8.load_config('model=tiny', 'trainer=cpu'); "
        "print(os.environ['MPLBACKEND'], os.environ.get('OMP_WAIT_POLICY'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True,
        env=os.environ | INLINE ,
    )  # fmt: skip
    assert done.stdout == f"{INLINE['MPLBACKEND']} None\n", done.stderr

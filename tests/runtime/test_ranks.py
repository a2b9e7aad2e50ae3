"""Which process of a run this is, by its launcher's variables; and programs that are one process."""

import os

import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime import ranks
from gpt2_fp8.runtime.ranks import Ranks, current
from tests import forkserver

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "node[05-08,11],gpu1",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, Ranks()),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Ranks()),  # of a container
        (TORCHRUN, Ranks("torchrun", 5, 8, 1, 4, 1, 0, True)),
        (TORCHRUN | SRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}, Ranks("torchrun", 5, 8, 1, 4, 1, 2, True)),
        (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, Ranks("accelerate launch", 5, 8, 1, 4, 1, 0, True)),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "gpt2_fp8"}, Ranks("torch's agent", 5, 8, 1, 4, 1, 0, True)),
        (SRUN, Ranks("srun", 5, 8, 1, 4, 1)),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, Ranks("srun", 5, 8, 1, 4, 1)),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, Ranks()),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}, Ranks()),  # of Lightning's launcher
        (BY_HAND, Ranks("RANK and WORLD_SIZE", 1, 2, 1, 2, 0)),
    ],
)
def test_the_place_of_a_process(environment, found):
    assert current(environment) == found


@pytest.mark.parametrize(
    ("environment", "cause"),
    [
        (BY_HAND | {"RANK": "one"}, "RANK is 'one', not a number"),
        (BY_HAND | {"RANK": "2"}, "RANK=2, WORLD_SIZE=2 .* do not fit"),
        (BY_HAND | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (BY_HAND | {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "do not fit"),
    ],
)
def test_variables_that_cannot_be_are_refused(environment, cause):
    with pytest.raises(UserError, match=cause):
        current(environment)


def test_torch_is_told_what_srun_says(monkeypatch):
    for name in (*BY_HAND, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.setenv(name, "")
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    ranks.export()
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")] == ["5", "8", "node05"]
    assert current() == Ranks("srun", 5, 8, 1, 4, 1)


@pytest.mark.whole
def test_a_program_refuses_to_be_several(tmp_path):
    done = forkserver.python("-m", "gpt2_fp8.table", "x", cwd=tmp_path, **BY_HAND | {"RANK": "0", "LOCAL_RANK": "0"})
    assert (done.returncode, done.stderr.count("error:")) == (2, 1)
    assert "table is one process" in done.stderr
    done = forkserver.python("-m", "gpt2_fp8.table", "x", cwd=tmp_path, **BY_HAND)
    assert (done.returncode, done.stderr) == (2, "")

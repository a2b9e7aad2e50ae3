"""Which launcher an environment is of. The tables are what torch 2.13's agent and SLURM 22.05 to 24.11 set."""

import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime.launched import Launcher
from gpt2_fp8.runtime.launcher import forget_leftovers, is_first_of_all, is_first_rank, recognised

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "ROLE_RANK": "5",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "41234", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
ALONE = TORCHRUN | {"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "7ff8a8cf-fb60-4fa8-a7a2-ec2d56ba8f7b"}
SRUN = {
    "SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_NODELIST": "gpu[07-08]",
}  # fmt: skip
BATCH_SCRIPT = {  # of a job of eight tasks, where no srun is involved
    "SLURM_JOB_ID": "1234567", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}  # fmt: skip
BY_HAND = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501",
}  # fmt: skip
LIGHTNINGS = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
PLACE = {"rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4, "node": 1, "nodes": 2}
AGENT = Launcher("torchrun", address="node1", port=41234, agent_listens=True, restarts_left=3, **PLACE)
SLURMS = Launcher("srun", address="gpu07", port=19567, step="1234567.0", **PLACE)
HAND = Launcher("RANK and WORLD_SIZE", 1, 2, 1, 2, 0, 1, "127.0.0.1", 29501)
KNOWN = {
    "nothing": ({}, Launcher("Lightning")),
    "a rank of Lightning's": (LIGHTNINGS, Launcher("Lightning", rank=1, local_rank=1)),
    "torchrun": (TORCHRUN, AGENT),
    "torchrun, again": (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}, AGENT._replace(restarts=2, restarts_left=1)),
    "a rank that listens": (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, AGENT._replace(agent_listens=False)),
    "accelerate": (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, AGENT._replace(name="accelerate launch")),
    "an agent on each node, by srun": (SRUN | {"SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN, AGENT),
    "what is left of an agent on each node": (
        SRUN | TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"},
        AGENT._replace(nodes=1, node=0),
    ),
    "likewise, of more than two": (SRUN | TORCHRUN, AGENT),
    "torchrun in a batch script": (BATCH_SCRIPT | TORCHRUN, AGENT),
    "srun": (SRUN, SLURMS),
    "srun, with a place to meet": (
        SRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"},
        SLURMS._replace(address="10.0.0.7", port=29500),
    ),
    "another step of the job": (
        SRUN | {"SLURM_STEP_ID": "1"},
        SLURMS._replace(port=20576, step="1234567.1"),
    ),
    "srun on one node": (
        SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "8"},
        SLURMS._replace(address="127.0.0.1", local_world_size=8, node=0, nodes=1),
    ),
    "srun, in a job that SLURM has started again": (SRUN | {"SLURM_RESTART_COUNT": "2"}, SLURMS._replace(restarts=2)),
    "one task, likewise": (
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "1"},
        Launcher("Lightning", restarts=1),
    ),
    "torchrun, likewise": (
        BATCH_SCRIPT | TORCHRUN | {"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "1"},
        AGENT._replace(restarts=2, restarts_left=2),
    ),
    "a shell on a node": (
        BATCH_SCRIPT | {"SLURM_JOB_NAME": "bash", "SLURM_RESTART_COUNT": "1"},
        Launcher("Lightning"),
    ),
    "srun of one task": (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Launcher("Lightning")),
    "a batch script": (BATCH_SCRIPT, Launcher("Lightning")),
    "by hand": (BY_HAND, HAND),
    "by hand, on two nodes": (
        BY_HAND | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        HAND._replace(local_rank=0, local_world_size=1, node=1, nodes=2),
    ),
    "what an agent has left behind": ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": ""}, Launcher("Lightning")),
    "by hand, as srun says it": (
        SRUN | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07", "LOCAL_WORLD_SIZE": "4"},
        Launcher("RANK and WORLD_SIZE", address="gpu07", port=29500, **PLACE),
    ),
    "the only process": ({"RANK": "0", "WORLD_SIZE": "1"}, Launcher("Lightning")),
}
REFUSED = {
    "no address": (
        {k: v for k, v in BY_HAND.items() if k != "MASTER_ADDR"},
        "MASTER_ADDR is not set, and 2 processes (WORLD_SIZE)",
    ),
    "an empty address": ({**BY_HAND, "MASTER_ADDR": ""}, "MASTER_ADDR is not set, and 2 processes (WORLD_SIZE)"),
    "an address with a port": (BY_HAND | {"MASTER_ADDR": "gpu01:29500"}, "MASTER_ADDR='gpu01:29500' has a port in it"),
    "likewise, of srun": (SRUN | {"MASTER_ADDR": "gpu01:29500"}, "MASTER_ADDR='gpu01:29500' has a port in it"),
    "a number that no int takes": (BY_HAND | {"WORLD_SIZE": "9" * 5000}, "not a number"),
    "no local rank": ({k: v for k, v in BY_HAND.items() if k != "LOCAL_RANK"}, "LOCAL_RANK is not set"),
    "no number": (BY_HAND | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
    "no port": (BY_HAND | {"MASTER_PORT": "80000"}, "MASTER_PORT=80000 is no port"),
    "a rank too many": (BY_HAND | {"RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
    "no process": (BY_HAND | {"WORLD_SIZE": "0"}, "WORLD_SIZE=0, and this is a process"),
    "a place that the node does not have": (
        BY_HAND | {"LOCAL_RANK": "2"},
        "LOCAL_RANK=2 is not below WORLD_SIZE=2",
    ),
    "likewise, of several nodes": (
        BY_HAND | {"LOCAL_WORLD_SIZE": "1"},
        "LOCAL_RANK=1 is not below LOCAL_WORLD_SIZE=1",
    ),
    "half of what an agent sets": (
        {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"},
        "TORCHELASTIC_RUN_ID is set, as by torchrun, which would have set LOCAL_RANK and LOCAL_WORLD_SIZE too",
    ),
    "unequal nodes": (BY_HAND | {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 does not divide"),
    "a run in each task": (SRUN | ALONE, "srun has started 8 tasks, and in each"),
    "a run in each task, at a port": (
        SRUN | ALONE | {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1"},
        "srun has started 8 tasks, and in each",
    ),
    "other ranks than srun's": (SRUN | BY_HAND, "RANK=1 of WORLD_SIZE=2, and srun says task 5 of 8"),
    "mpirun": ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun has started 4 processes"),
    "other tasks on each node": (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, "not as many on each"),
}


@pytest.mark.parametrize("case", KNOWN)
def test_a_launcher_is_recognised(case):
    environment, expected = KNOWN[case]
    assert recognised(environment) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_variables_that_cannot_be_are_refused(case):
    environment, cause = REFUSED[case]
    with pytest.raises(UserError) as refused:
        recognised(environment)
    (problem,) = refused.value.problems
    assert cause in problem.cause


WHOLE = {
    "a container's leftovers": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "pod-0"},
    "half of them": {"WORLD_SIZE": "1"},
    "the other half": {"RANK": "0"},
    "one of Lightning's": LIGHTNINGS,
    "one of Lightning's, whose group is gone": {k: v for k, v in LIGHTNINGS.items() if k != "WORLD_SIZE"},
    "Lightning on one of two nodes": {"NODE_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
}
HALVES = {
    "no number of processes": ({"RANK": "1"}, "RANK=1, which one of several processes has, and WORLD_SIZE is not set"),
    "the first of them": ({"RANK": "0", "MASTER_ADDR": "a"}, "RANK=0, which one of several processes has, and WORLD_S"),
    "too few processes": ({"RANK": "1", "WORLD_SIZE": "1"}, "and WORLD_SIZE is 1"),
    "no rank": ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "WORLD_SIZE=2, which one of several processes has, and RANK"),
    "a script that forgets srun": (BATCH_SCRIPT | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8"),
    "only a local rank": ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1, which one of several processes has, and WORLD_SIZE"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_run_of_one_process_needs_no_variables(case):
    assert recognised(WHOLE[case], trains=True).name == "Lightning"


@pytest.mark.parametrize("case", HALVES)
def test_one_of_several_processes_is_no_run_of_its_own(case):
    environment, cause = HALVES[case]
    with pytest.raises(UserError) as refused:
        recognised(environment, trains=True)
    (problem,) = refused.value.problems
    assert cause in problem.cause
    assert recognised(environment).name == "Lightning"  # for what trains nothing


LEFT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "left"),
    [
        (LEFT, {}),
        (LIGHTNINGS, LIGHTNINGS),
        (SRUN | LEFT, SRUN),
        (BY_HAND, BY_HAND),
        (LEFT | {"RANK": "", "MASTER_PORT": "", "SLURM_PROCID": ""}, {}),
        ({"RANK": "0", "MASTER_ADDR": "a"}, {"RANK": "0", "MASTER_ADDR": "a"}),  # half of what several processes have
        (TORCHRUN | LEFT, TORCHRUN | LEFT),
    ],
)
def test_what_is_left_of_another_launcher_is_forgotten(monkeypatch, environment, left):
    monkeypatch.setattr("gpt2_fp8.runtime.launcher.os.environ", given := dict(environment))
    forget_leftovers()
    assert given == left


@pytest.mark.parametrize(
    ("listed", "first"),
    [("gpu07", "gpu07"), ("gpu[07,09-11]", "gpu07"), ("a3,b[1-2]", "a3"), ("r[1-2]n[5-6]", "r1n5"), ("n[10]", "n10")],
)
def test_the_first_node_of_a_list(listed, first):
    assert recognised(SRUN | {"SLURM_STEP_NODELIST": listed}).address == first


def test_what_may_have_been_started_again():
    """An agent without a store counts failures, and neither nodes that join nor nodes that have left."""
    assert not AGENT.again
    assert AGENT._replace(restarts=1).again
    assert AGENT._replace(agent_listens=False).again
    assert not SLURMS.again
    assert not HAND.again
    assert not Launcher("Lightning").again


def test_it_is_said_in_a_line():
    assert str(AGENT) == "torchrun: 8 processes on 2 nodes"
    assert str(AGENT._replace(restarts=1, nodes=1)) == "torchrun: 8 processes, started again"
    assert str(SLURMS._replace(restarts=2)) == "srun: 8 processes on 2 nodes, started again 2 times"


@pytest.mark.parametrize(
    ("environment", "first", "of_all"),
    [
        ({}, True, True),
        (LIGHTNINGS, False, False),
        (BATCH_SCRIPT, True, True),
        (SRUN, False, False),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, True, True),
        (SRUN | TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, True, False),  # the agent may be on any node
        (BATCH_SCRIPT | LIGHTNINGS, False, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, True, False),
        ({"LOCAL_RANK": "1"}, False, True),  # left in a shell
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "1"}, False, True),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, False, False),
    ],
)
def test_one_process_speaks_for_all(monkeypatch, environment, first, of_all):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (is_first_rank(), is_first_of_all()) == (first, of_all)

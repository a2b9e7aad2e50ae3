"""What the processes of a launcher tell each other before a run, on machines that are not here."""

import pytest

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.runtime import devices
from gpt2_fp8.runtime.launched import Launcher
from gpt2_fp8.train.gathering import told, unequal, uneven

H200, H100 = {"name": "NVIDIA H200", "memory": "140 GiB"}, {"name": "NVIDIA H100", "memory": "79 GiB"}


def rank(host, gpu=None, number=0, problems=()):
    return {"host": host, "gpu": gpu and gpu | {"id": f"GPU-{number}"}, "problems": list(problems)}


def test_equal_gpus_on_two_nodes():
    assert unequal([rank(host, H200, number) for host in ("a", "b") for number in range(4)]) == []
    assert unequal([rank("a"), rank("a"), rank("b")]) == []


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        (
            [rank("a", H200, 0), rank("b", H100, 0)],
            "rank 1 on b has NVIDIA H100 with 79 GiB, and rank 0 on a NVIDIA H200 with 140 GiB",
        ),
        ([rank("a", H200, 0), rank("b")], "rank 1 on b has no GPU, and rank 0 on a NVIDIA H200 with 140 GiB"),
        ([rank("a", H200, 3), rank("a", H200, 3)], "ranks 0 and 1 on a would share one GPU, NVIDIA H200"),
    ],
)
def test_unequal_gpus(ranks, cause):
    (problem,) = unequal(ranks)
    assert problem.cause == cause


def test_nodes_with_different_numbers_of_processes():
    ranks = [rank(host) | {"local_world_size": count} for host, count in (("a", 1), ("b", 2), ("b", 2))]
    (problem,) = uneven("torchrun", ranks)
    assert problem.cause == ("torchrun has started 3 processes, 1 on a and 2 on b (rank 1): not as many on each node")
    assert problem.remedy == "--nproc-per-node N, the same number on every node"
    assert uneven("torchrun", ranks[1:]) == []


def test_a_problem_of_all_is_said_once_and_one_of_some_by_its_rank():
    everyones, one = Problem("no such key", "another"), Problem("no such file", "copy it")
    ranks = [rank("a", problems=[everyones]), rank("b", problems=[everyones, one]), rank("b", problems=[everyones])]
    assert told(ranks) == [everyones, Problem("rank 1 on b: no such file", "copy it")]


def started(name, local_rank, count):
    return Launcher(name, local_rank, count, local_rank, count)


def test_each_process_of_a_node_has_the_gpu_of_its_place():
    assert [devices.place(started("torchrun", local_rank, 4), 4) for local_rank in range(4)] == [0, 1, 2, 3]
    assert [devices.place(started("torchrun", local_rank, 2), 4) for local_rank in range(2)] == [0, 1]
    assert [devices.place(started("srun", local_rank, 4), 1) for local_rank in range(4)] == [0, 0, 0, 0]  # its own


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("torchrun", "--nproc-per-node 4"),
        ("accelerate launch", "--num_processes 4"),
        ("srun", "--ntasks-per-node 4"),
        ("RANK and WORLD_SIZE", "LOCAL_WORLD_SIZE=4"),
    ],
)
def test_more_processes_than_gpus(name, option):
    with pytest.raises(UserError) as refused:
        devices.place(started(name, 0, 8), 4)
    (problem,) = refused.value.problems
    assert problem.cause == f"{name} has started 8 processes on this node, and torch sees 4 GPUs"
    assert problem.remedy.startswith(option)

"""What GPUs tell each other: whole runs of several ranks, side by side, in some of which a fault meets rank 1 alone.

With RANKS_SHARE_A_GPU=1 the ranks share the GPU of a machine that has one, in ten minutes and more. What needs
trainer.devices, or memory of one's own, is not run there.
"""

import importlib.util
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from gpt2_fp8.engine.replicas import checksum
from tests.gpu import launches
from tests.gpu.common import hopper
from tests.gpu.launches import SHARED, Launch
from tests.gpu.test_faults import OURS, ROADS, WIDE, happened
from tests.gpu.test_runs import ON_GPU
from tests.runs import checkpoint, metrics, summary

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.fp8, pytest.mark.skipif(GPUS < 2 and not SHARED, reason="fewer than two GPUs")]
ACCELERATE = importlib.util.find_spec("accelerate") is not None
own_gpus = pytest.mark.skipif(SHARED, reason="its ranks need a GPU each")
FOUR = SHARED or GPUS >= 4
four = pytest.mark.skipif(not FOUR, reason="fewer than four GPUs")

# Runs; more of them would wait for each other on the GPUs.
AT_ONCE = max(1, min(2 if SHARED else 8, (os.cpu_count() or 1) // 4))
SHORT = ["micro_batch_size=4", "trainer.max_steps=8", "trainer.val_check_interval=4"]
# A low rate: at a high one a run leaves its like exponentially, whatever makes the first bit of difference.
LONG = [
    "micro_batch_size=4", "trainer.max_steps=50", "trainer.val_check_interval=50", "optim.lr=1e-4",
    "callbacks.checkpoint_every_n_steps=20",
]  # fmt: skip
LARGE = [
    *SHORT, *WIDE, "global_batch_size=64", "micro_batch_size=16", "data.val_sequences=32",
    "callbacks.checkpoint_every_n_steps=4",
]  # fmt: skip
ALL = ("delayed", "current", "fused", "graphs", "bf16")
EVERY_ROAD = [pytest.param(road, marks=hopper if road in OURS else ()) for road in ALL]
KILLED = ["killed_before_its_gradients", "killed_in_the_exchange"]


SMALL_LLAMA = [
    *WIDE, "model.norm=rms_norm", "model.mlp=swiglu", "model.positions=rope", "model.tied_head=false",
    "model.bias=false", "model.n_kv_head=4", "micro_batch_size=2", "trainer.max_steps=12",
    "trainer.val_check_interval=6", "optim.lr=1e-4", "optim.ema_decay=0.8",
    "callbacks.checkpoint_every_n_steps=6",
]  # fmt: skip
IN_TE = [*ON_GPU[1:], *SMALL_LLAMA, "precision.backend=te", "recipe=delayed"]


def words(road, *more):
    of_road, base = ROADS[road]
    return [*base, *of_road, *more]


ON_OWN_GPUS = {
    "fsdp, no memory on one": [Launch([*IN_TE, "trainer=fsdp"], faults=("out_of_memory",))],
    "scarce": [Launch(words("fused", *LARGE), faults=("scarce",))],
    **{name: [Launch(words("fused", *SHORT), faults=(name,))] for name in (*KILLED, "hangs_in_the_exchange")},
    "fused, trainer.devices": [Launch(words("fused", *LONG, "trainer.max_restarts=1"), faults=("killed_once",))],
    "fused, moved": [
        Launch(words("fused", *LONG), faults=("stopped",)),
        Launch(words("fused", *LONG, "ckpt_path=last"), gpus=1),
    ],
    "bf16, moved": [
        Launch(words("bf16", *LONG), gpus=1, faults=("stopped_alone",)),
        Launch(words("bf16", *LONG, "ckpt_path=last"), "srun"),
    ],
}  # fmt: skip
CASES = {
    **({} if SHARED else ON_OWN_GPUS),
    "fsdp": [
        Launch([*IN_TE, "trainer=fsdp"], gpus=max(2, GPUS), faults=("stopped",)),
        Launch([*IN_TE, "trainer=ddp", "ckpt_path=last"]),
    ],
    "fsdp, one GPU": [Launch(words("bf16", *SMALL_LLAMA), gpus=1)],
    "fsdp, no memory": [Launch([*IN_TE, "trainer=fsdp"], faults=("out_of_memory_on_all",))],
    "muon": [Launch(words("fused", *LONG, "optimizer=muon"))],
    "muon, one GPU": [Launch(words("fused", *LONG, "optimizer=muon"), gpus=1)],
    **{f"{road}, faults": [Launch(words(road, *SHORT), faults=("out_of_memory", "not_finite"))] for road in
       ("delayed", "fused")},
    "graphs, faults": [
        Launch(words("graphs", *SHORT), faults=("no_room_for_graphs", "not_finite", "no_room_in_bf16"))
    ],
    "fused, faults, srun": [Launch(words("fused", *SHORT), "srun", faults=("out_of_memory", "not_finite"))],
    **{f"{road}, short, one GPU": [Launch(words(road, *SHORT), gpus=1)] for road in ("delayed", "fused", "graphs")},
    **{road: [Launch(words(road, *LONG))] for road in ALL},
    **{f"{road}, one GPU": [Launch(words(road, *LONG), gpus=1)] for road in ALL},
    "fused, torchrun": [Launch(words("fused", *LONG), "torchrun", faults=("killed_once",))],
    "delayed, two nodes": [Launch(words("delayed", *LONG), "two nodes", faults=("killed_once",))],
    "current, srun": [Launch(words("current", *LONG), "srun")],
    **({"bf16, accelerate": [Launch(words("bf16", *LONG), "accelerate")]} if ACCELERATE else {}),
    **({f"{road}, four": [Launch(words(road, *LONG), gpus=4)] for road in ALL} if FOUR else {}),
    **({f"{road}, two nodes of two": [Launch(words(road, *LONG), "two nodes", 4)] for road in ALL} if FOUR else {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`runs(case)`: what became of it. All of them are under way from the first test on."""
    folder = tmp_path_factory.mktemp("ranks")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = {name: pool.submit(launches.run, folder / str(i), case) for i, (name, case) in enumerate(CASES.items())}
        yield lambda name: ended[name].result()
        pool.shutdown(cancel_futures=True)


def completed(runs, case):
    run = runs(case)
    assert set(run.codes) == {0}, run.output
    return run.steps()


def assert_same_losses(runs, case, road):
    """Within 0.05 % in each of 50 steps, on the same tokens."""
    several, one = completed(runs, case), completed(runs, f"{road}, one GPU")
    assert several["step"] == one["step"] == list(range(1, 51))
    assert several["loss"] == pytest.approx(one["loss"], rel=5e-4)
    tables = [metrics(runs(name).folder) for name in (case, f"{road}, one GPU")]
    assert tables[0]["tokens"] == tables[1]["tokens"]
    assert tables[0]["grad_norm"][1] == pytest.approx(tables[1]["grad_norm"][1], rel=0.05), "before any update"


@pytest.mark.parametrize("road", EVERY_ROAD)
def test_two_gpus_compute_what_one_does(runs, road):
    assert_same_losses(runs, road, road)
    assert (completed(runs, road)["tensors"][-1] > 0) == (road in ("delayed", *OURS))
    assert ("in CUDA graphs" in runs(road).output) == (road == "graphs")


@hopper
def test_gpus_that_divide_muons_matrices_compute_what_one_does(runs):
    assert_same_losses(runs, "muon", "muon")


@four
@pytest.mark.parametrize("road", EVERY_ROAD)
@pytest.mark.parametrize("how", ["four", "two nodes of two"])
def test_four_gpus_compute_what_one_does(runs, road, how):
    assert_same_losses(runs, f"{road}, {how}", road)


@pytest.mark.parametrize(
    ("road", "launcher", "said"),
    [
        pytest.param("fused", "torchrun", "torchrun: 2 processes, started again", marks=hopper),
        pytest.param(
            "fused", "trainer.devices", "torch's agent: 2 processes, started again", marks=[hopper, own_gpus]
        ),
        ("delayed", "two nodes", "torchrun: 2 processes on 2 nodes, started again"),
        ("current", "srun", "srun: 2 processes"),
        pytest.param(
            "bf16", "accelerate", "accelerate launch: 2 processes",
            marks=pytest.mark.skipif(not ACCELERATE, reason="accelerate is not installed"),
        ),
    ],
)  # fmt: skip
def test_every_launcher_computes_what_one_gpu_does(runs, road, launcher, said):
    """Under torchrun, rank 1 is killed once: the agents start all processes again, which continue from `last`."""
    case = f"{road}, {launcher}"
    assert_same_losses(runs, case, road)
    assert f"launcher   {said}\n" in runs(case).output
    assert ("(step 20)" in runs(case).output) == ("again" in said)


@own_gpus
@pytest.mark.parametrize(("road", "saved"), [pytest.param("fused", 5, marks=hopper), ("bf16", 4)])
def test_43_a_run_that_is_stopped_moves_to_another_launcher_and_number_of_gpus(runs, road, saved):
    """SIGTERM to one rank of two saves and ends both after their step. One rank alone gives its step up."""
    case = f"{road}, moved"
    codes, output = runs(case).ends[0]
    assert codes == [143], output
    assert f"(step {saved})" in runs(case).output
    assert set(runs(case).codes) == {0}, runs(case).output
    losses = [list(metrics(runs(name).folder)["train_loss"].values()) for name in (case, f"{road}, one GPU")]
    assert losses[0] == pytest.approx(losses[1], rel=5e-4)


FUSED_FAULTY = ("fused, faults", "fused, faults, srun", "graphs, faults")
FAULTY = ["delayed, faults", *(pytest.param(case, marks=hopper) for case in FUSED_FAULTY)]


@pytest.mark.parametrize("case", FAULTY)
def test_65_out_of_memory_in_a_backward_on_one_gpu_halves_on_both(runs, case):
    steps, one = completed(runs, case), completed(runs, f"{case.partition(',')[0]}, short, one GPU")
    assert steps["size"] == [4] * 2 + [2] * 6
    assert "micro_batch_size 2 instead of 4 from here on (another rank ran out of memory)" in runs(case).output
    assert steps["step"] == one["step"] == list(range(1, 9))
    assert steps["loss"] == pytest.approx(one["loss"], rel=1e-2)


@pytest.mark.parametrize("case", FAULTY)
def test_37_a_loss_that_is_not_finite_on_one_gpu_is_run_again_on_both(runs, case):
    assert completed(runs, case)["again"] == [False] * 5 + [True] + [False] * 2
    assert happened(runs(case).folder) == [(6, "rerun")]
    assert "micro_batch_size in bf16" not in runs(case).output, "graphs were freed, on both"


@own_gpus
@hopper
def test_65_memory_that_is_scarce_on_one_gpu_halves_on_both(runs):
    sizes = completed(runs, "scarce")["size"]
    assert sizes[:2] == [16, 16]
    assert max(sizes[2:]) < 16
    assert "instead of 16 from here on (another rank ran out of memory)" in runs("scarce").output
    assert (len(sizes), summary(runs("scarce").folder)["status"]) == (4, "completed")


@own_gpus
@hopper
@pytest.mark.parametrize("case", KILLED)
def test_49_a_rank_that_is_killed_is_named_by_the_other(runs, case):
    """And nothing is left running: `run` looks. A rank that waits in NCCL has the agent's half minute."""
    run = runs(case)
    assert run.codes == [1], run.output
    assert re.search(r"rank 1 \(process \d+\) was killed by SIGKILL", run.output), run.output


def test_a_sharded_model_trains_as_one_gpu_does_and_goes_on_replicated(runs):
    """In FP8 on all GPUs, then on two by data parallelism; one GPU trains it in bf16."""
    sharded, alone = runs("fsdp"), runs("fsdp, one GPU")
    (first, _), (second, _) = sharded.ends
    assert 143 in first, sharded.ends[0][1]  # srun's other rank has a code of its own
    assert set(second) == {0}, sharded.output
    assert set(alone.codes) == {0}, alone.output
    assert "layers     Transformer Engine" in sharded.ends[0][1]
    own, in_bf16 = (metrics(run.folder)["train_loss"] for run in (sharded, alone))
    assert own == pytest.approx(in_bf16, rel=2e-2)
    assert own.keys() == set(range(1, 13))
    averages = [load_file(checkpoint(run.folder, 12) / "average.safetensors") for run in (sharded, alone)]
    torch.testing.assert_close(*averages, rtol=0.05, atol=2e-3)


def test_out_of_memory_on_all_gpus_begins_a_sharded_step_again(runs):
    steps, one = completed(runs, "fsdp, no memory"), runs("fsdp, one GPU")
    assert steps["size"] == [2] * 2 + [1] * 10
    assert steps["loss"] == pytest.approx(list(metrics(one.folder)["train_loss"].values()), rel=2e-2)


@own_gpus  # an agent ends the rank that waits; srun's variables have none
def test_out_of_memory_on_one_gpu_ends_a_sharded_run_with_its_name(runs):
    run = runs("fsdp, no memory on one")
    assert run.codes == [2], run.output
    assert run.output.count("out of memory on rank 1 alone with micro_batch_size=2") == 1, run.output


@own_gpus
@hopper
def test_49_a_rank_that_hangs_ends_the_run_and_leaves_what_nccl_did(runs):
    run = runs("hangs_in_the_exchange")
    assert run.codes == [1], run.output
    assert "SIGABRT" in summary(run.folder)["message"]
    assert (run.folder / "nccl_0").stat().st_size


def test_weights_of_1_5b_are_compared_within_10_ms():
    block = [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400), (4800,), (6400,), *[(1600,)] * 6]
    weights = [torch.randn(shape, device="cuda") for shape in [(50304, 1600), (1024, 1600), *48 * block, (1600,)]]
    assert checksum(weights[1:20]) == checksum([weight.cpu() for weight in weights[1:20]])
    before, seconds = torch.cuda.memory_allocated(), []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        checksum(weights)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.010, seconds
    assert torch.cuda.max_memory_allocated() - before < 100e6

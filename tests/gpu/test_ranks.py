"""What two GPUs tell each other: whole runs of two ranks, side by side, in some of which a fault meets rank 1 alone."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.gpu.common import hopper
from tests.gpu.test_faults import ROADS, WIDE, happened
from tests.runs import checkpoint, metrics, summary
from tests.train.test_ddp import finish, start

pytestmark = [
    pytest.mark.fp8,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]

SECONDS = 100  # that a run may take; most of it is start-up
AT_ONCE = max(1, min(8, (os.cpu_count() or 1) // 4))  # runs; more of them would wait for each other on the GPUs
PATHS = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, PATHS))}

STEPS = ["micro_batch_size=4", "trainer.max_steps=8", "trainer.val_check_interval=4"]
LARGE = [
    *WIDE, "global_batch_size=64", "micro_batch_size=16", "data.val_sequences=32",
    "callbacks.checkpoint_every_n_steps=4",
]  # fmt: skip
COMPARED = ["delayed", "current", pytest.param("fused", marks=hopper), "bf16"]
WITH_SCALES = ["delayed", pytest.param("fused", marks=hopper)]
KILLED = ["killed_before_its_gradients", "killed_in_the_exchange"]


def words(road, *more, gpus=2):
    of_road, base = ROADS[road]
    return [*base, *STEPS, f"trainer.devices={gpus}", "run_name=run", *of_road, *more]


# {name: (command line, what of `rank_faults` is called in its processes)}
CASES = {
    "scarce": (words("fused", *LARGE), ["scarce"]),
    **{name: (words("fused"), [name]) for name in ("stopped", *KILLED)},
    **{f"{road}, faults": (words(road), ["out_of_memory", "not_finite"]) for road in ("delayed", "fused")},
    **{road: (words(road), []) for road in ("delayed", "current", "fused", "bf16")},
    **{f"{road}, one GPU": (words(road, gpus=1), []) for road in ("delayed", "current", "fused", "bf16")},
}


def run(cwd, arguments, faults):
    """The exit code, what was printed, and the run's folder; fails where a process is left running."""
    cwd.mkdir()
    patch = "from tests.gpu import rank_faults\n" + "".join(f"rank_faults.{name}()\n" for name in ["note", *faults])
    process = start(cwd, *arguments, patch=patch, environment=ENVIRONMENT, popen=subprocess.Popen)
    return *finish(process, SECONDS), cwd / "outputs/run"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`runs(case)`: what `run` says of it. All of them are under way from the first test on."""
    folder = tmp_path_factory.mktemp("ranks")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ends = {name: pool.submit(run, folder / str(i), *case) for i, (name, case) in enumerate(CASES.items())}
        yield lambda name: ends[name].result()
        pool.shutdown(cancel_futures=True)


def steps(runs, case, code=0):
    """{column: its values} of the notes of a run's steps. They have to be the same on all of its ranks: losses, scales
    and weights bit for bit, and the sizes of micro-batches."""
    ended, output, folder = runs(case)
    assert ended == code, output
    files = sorted(folder.parents[1].glob("rank-*"))
    assert len(files) == (1 if case.endswith("one GPU") else 2)
    notes = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    assert notes[0] == notes[-1]
    return {column: [note[column] for note in notes[0]] for column in notes[0][0]}


def assert_same_losses(runs, case, road):
    two, one = steps(runs, case), steps(runs, f"{road}, one GPU")
    assert two["step"] == one["step"] == list(range(1, 9))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-2)


@pytest.mark.parametrize("road", COMPARED)
def test_two_gpus_compute_what_one_does(runs, road):
    assert_same_losses(runs, road, road)
    assert (steps(runs, road)["tensors"][-1] > 0) == (road in ("delayed", "fused"))
    norms = [metrics(runs(case)[2])["grad_norm"][1] for case in (road, f"{road}, one GPU")]
    assert norms[0] == pytest.approx(norms[1], rel=0.05), "of the mean over both ranks, before any update"


@pytest.mark.parametrize("road", WITH_SCALES)
def test_65_out_of_memory_in_a_backward_on_one_gpu_halves_on_both(runs, road):
    case = f"{road}, faults"
    assert steps(runs, case)["size"] == [4] * 2 + [2] * 6
    assert "micro_batch_size 2 instead of 4 from here on (another rank ran out of memory)" in runs(case)[1]
    assert_same_losses(runs, case, road)


@hopper
def test_65_memory_that_is_scarce_on_one_gpu_halves_on_both(runs):
    sizes = steps(runs, "scarce")["size"]
    assert sizes[:2] == [16, 16]
    assert max(sizes[2:]) < 16
    assert "instead of 16 from here on (another rank ran out of memory)" in runs("scarce")[1]
    assert (len(sizes), summary(runs("scarce")[2])["status"]) == (4, "completed")


@pytest.mark.parametrize("road", WITH_SCALES)
def test_37_a_loss_that_is_not_finite_on_one_gpu_is_run_again_on_both(runs, road):
    case = f"{road}, faults"
    assert steps(runs, case)["again"] == [False] * 5 + [True] + [False] * 2
    assert happened(runs(case)[2]) == [(6, "rerun")]


@hopper
def test_43_a_sigterm_to_one_rank_saves_and_ends_both(runs):
    assert steps(runs, "stopped", code=143)["step"] == [1, 2, 3, 4, 5]
    folder = runs("stopped")[2]
    assert (summary(folder)["status"], summary(folder)["steps"]) == ("stopped", 5)
    assert checkpoint(folder, 5).is_dir()


@hopper
@pytest.mark.parametrize("case", KILLED)
def test_49_a_rank_that_is_killed_is_named_by_the_other(runs, case):
    """And nothing is left running: `run` looks."""
    code, output, folder = runs(case)
    assert code == 1, output
    message = summary(folder)["message"]
    assert message.startswith("rank 1 (process "), output
    assert "was killed by signal 9" in message
    assert message in output

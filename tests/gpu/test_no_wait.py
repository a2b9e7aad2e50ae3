"""The host of a run waits for the GPU by events alone, but for what is rare."""

import time

import pytest
import torch

from gpt2_fp8.callbacks import checkpointing
from gpt2_fp8.callbacks.throughput import Throughput
from gpt2_fp8.data.lane import Batches
from gpt2_fp8.engine.gradients import Gradients
from tests.gpu.common import hopper
from tests.gpu.test_runs import FUSED, GRAPHS, IN_BF16, ON_GPU
from tests.runs import metrics, train

pytestmark = pytest.mark.fp8

ROADS = [
    pytest.param(ON_GPU, FUSED, marks=hopper, id="fused"),
    pytest.param(ON_GPU, GRAPHS, marks=hopper, id="graphs"),
    pytest.param(ON_GPU, ["precision.backend=te"], id="te"),
    pytest.param(IN_BF16, [], id="bf16"),
]
LAST = 17


@pytest.fixture(autouse=True)
def _waits_as_before():
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("base", "words"), ROADS)
def test_no_step_waits_for_the_gpu_not_even_one_with_a_row_of_the_log(tmp_path, monkeypatch, base, words):
    """A wait would be an error: of `.item()`, of memory that is not pinned. `Event.synchronize` is none."""

    def start(self, trainer, *_):
        step = trainer.global_step + 1
        torch.cuda.set_sync_debug_mode("error" if 2 < step < LAST else "default")

    log, ahead = Throughput._log, {}

    def logged(self, trainer, *metrics):
        ahead[trainer.global_step] = trainer.lightning_module.step._ahead is not None
        log(self, trainer, *metrics)

    monkeypatch.setattr(Throughput, "_log", logged)
    monkeypatch.setattr(checkpointing.Checkpointing, "on_train_batch_start", start)
    rare = [f"trainer.max_steps={LAST}", "trainer.val_check_interval=100", "callbacks.checkpoint_every_n_steps=0"]
    train(tmp_path / "run", *words, *rare, "trainer.log_every_n_steps=6", base=base)
    assert list(metrics(tmp_path / "run")["train_loss"]) == [1, 6, 12, 17]
    assert ahead == {1: False, 6: True, 12: True, 17: False}, "the next step's gradients are launched by then"


@pytest.mark.parametrize(("cycles", "least", "most"), [(0, 0.3, 1.0), (400_000_000, 0.0, 0.02)])
def test_data_is_waited_for_only_while_the_gpu_has_nothing_to_do(tmp_path, monkeypatch, cycles, least, most):
    """A batch takes the host 0.1 s; with `cycles` a step takes the GPU 0.2 s or more, so it is there in time."""
    made, of_step = Batches.next, Gradients.of_step

    def computed(self, ids, size):
        torch.cuda._sleep(cycles)
        return of_step(self, ids, size)

    monkeypatch.setattr(Batches, "next", lambda self: time.sleep(0.1) or made(self))
    monkeypatch.setattr(Gradients, "of_step", computed)
    rare = ["trainer.val_check_interval=12", "callbacks.checkpoint_every_n_steps=0"]
    train(tmp_path / "run", *rare, "trainer.log_every_n_steps=4", base=IN_BF16)
    waits = metrics(tmp_path / "run")["data_wait"]
    assert all(least <= waits[step] <= most for step in (8, 12))

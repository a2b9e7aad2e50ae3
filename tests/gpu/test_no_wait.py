"""The host of a run waits for the GPU by events alone, except where a row of the log, or what is rarer, needs it."""

import pytest
import torch

from gpt2_fp8.callbacks import checkpointing
from tests.gpu.common import hopper
from tests.gpu.test_runs import FUSED, GRAPHS, IN_BF16, ON_GPU
from tests.runs import train

pytestmark = pytest.mark.fp8

EVERY, LAST = 6, 17
ROADS = [
    pytest.param(ON_GPU, FUSED, marks=hopper, id="fused"),
    pytest.param(ON_GPU, GRAPHS, marks=hopper, id="graphs"),
    pytest.param(ON_GPU, ["precision.backend=te"], id="te"),
    pytest.param(IN_BF16, [], id="bf16"),
]


@pytest.fixture(autouse=True)
def _waits_as_it_was():
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("base", "words"), ROADS)
def test_between_two_rows_of_the_log_no_step_waits_for_the_gpu(tmp_path, monkeypatch, base, words):
    """A wait would be an error: of `.item()`, of memory that is not pinned. `Event.synchronize` is none."""
    free = []

    def start(self, trainer, *_):  # it is called first of all callbacks' hooks of a batch that is here
        step = trainer.global_step + 1
        quiet = step > 2 and step % EVERY not in (0, 1) and step != LAST
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")
        free.extend([step] if quiet else [])

    monkeypatch.setattr(checkpointing.Checkpointing, "on_train_batch_start", start)
    often = [f"trainer.log_every_n_steps={EVERY}", f"trainer.max_steps={LAST}", "trainer.val_check_interval=100"]
    train(tmp_path / "run", *words, *often, "callbacks.checkpoint_every_n_steps=0", base=base)
    assert free == [3, 4, 5, 8, 9, 10, 11, 14, 15, 16]

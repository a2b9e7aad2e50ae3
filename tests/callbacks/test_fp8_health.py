"""When FP8's health is read and sampled: between two intervals nothing is touched, and only rank 0 looks."""

from types import SimpleNamespace

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.callbacks import fp8_health
from gpt2_fp8.callbacks.fp8_health import FP8HealthLog
from gpt2_fp8.config.schema import DelayedRecipe
from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.fp8.fp8_tensors import FP8Tensor


class Touched(SimpleNamespace):
    """A training step that counts what it is asked. With `late` it is settled when the next one comes."""

    def __init__(self, steps_in_fp8, late):
        recipe = DelayedRecipe(name="delayed", margin=0, amax_history_len=16, amax_compute_algo="max")
        plan = SimpleNamespace(recipe=recipe.name, backend=SimpleNamespace(recipe=recipe))
        super().__init__(
            settled=0, plan=plan, attempts=SimpleNamespace(steps_in_fp8=steps_in_fp8), on_settled=[],
            settles_while_computing=late, open=False,
        )  # fmt: skip

    def settle(self):
        self.settled += 1
        self.finish()

    def finish(self, result=None):
        if self.open:
            self.open = False
            for function in self.on_settled:
                function(result or settled())


def settled(first=None, amax_outliers=0):
    return SimpleNamespace(first=first, read=lambda: SimpleNamespace(amax_outliers=amax_outliers))


@pytest.fixture
def watched(monkeypatch):
    """The callback over a pretended run: which steps were read, sampled, written and logged."""
    import torch

    seen = SimpleNamespace(read=[], sampled=[], written=[], logged=[])
    tensor = Health(FP8Tensor("head", "input", torch.float8_e4m3fn), 1.0, 448.0, 0.0)

    class Pretended:
        failed = None
        tensors = (tensor,)

        def __init__(self, step):
            pass

        def send(self):
            return f"sent in {seen.step}"

        def read(self, sent=None):
            seen.read.append(sent or seen.step)
            return [tensor]

        def sample(self, ids, stored):
            seen.sampled.append(seen.step)
            return stored

    monkeypatch.setattr(fp8_health, "FP8Health", Pretended)
    logger = SimpleNamespace(log_metrics=lambda metrics, step: seen.logged.append(step))

    def run(last, rank_zero=True, first=1, in_fp8=None, late=False, results=()):
        (config,) = compose.preflight(["trainer.log_every_n_steps=10", "callbacks.fp8_health_every_n_steps=50"])
        callback = FP8HealthLog(config, lambda step, healths: seen.written.append(step))
        module = SimpleNamespace(step=Touched(in_fp8 or last, late))
        trainer = SimpleNamespace(
            is_global_zero=rank_zero, global_step=first - 1, loggers=[logger], should_stop=False, max_steps=last
        )
        callback.on_fit_start(trainer, module)
        callback.on_train_start(trainer, module)
        for step in range(first, last + 1):
            module.step.finish(dict(results).get(step - 1))  # the next one has been launched
            module.step.open = True
            trainer.global_step = seen.step = step
            callback.on_train_batch_end(trainer, module, None, {"ids": ...}, 0)
        return module.step.settled

    seen.run = run
    return seen


def test_between_intervals_nothing_is_asked(watched):
    assert watched.run(124) == 14
    assert watched.read == watched.logged == [1, *range(10, 121, 10), 124]
    assert watched.sampled == watched.written == [1, 50, 100, 124]


def test_the_last_step_in_fp8_is_the_last_that_is_looked_at(watched):
    assert watched.run(124, in_fp8=103) == 12
    assert watched.read == watched.logged == [1, *range(10, 101, 10), 103]
    assert watched.sampled == watched.written == [1, 50, 100, 103]


def test_only_rank_0_reads_and_all_ranks_settle(watched):
    assert watched.run(40, rank_zero=False) == 5
    assert watched.read == watched.sampled == watched.logged == []


def test_what_a_step_leaves_is_read_while_the_gpu_computes_the_next_one(watched):
    """Only a sampled pass, and the last step, wait for the GPU."""
    assert watched.run(64, late=True) == 3
    late = [f"sent in {step}" for step in (10, 20, 30, 40)]
    assert watched.read == [1, *late, 50, "sent in 60", 64]
    assert watched.logged == [1, *range(10, 61, 10), 64]
    assert watched.sampled == watched.written == [1, 50, 64]


@pytest.mark.parametrize("result", [settled(first="not finite"), settled(amax_outliers=1)])
def test_a_step_that_has_changed_what_it_left_is_read_anew(watched, result):
    watched.run(31, late=True, results={20: result})
    assert watched.read == [1, "sent in 10", 20, "sent in 30", 31]

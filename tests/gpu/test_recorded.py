"""torch.compile's own CUDA graphs (`compile_mode=reduce-overhead`): steps, validation and new sizes as without them."""

import pytest
import torch

from tests.gpu.common import error, prepared, step, tokens

WORDS = ["precision=bf16", "model.n_layer=1"]
RECORDED = [*WORDS, "compile=true", "compile_mode=reduce-overhead"]


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_same_steps(plain, graphed, seeds, size=4):
    for seed in seeds:
        (loss, expected), (again, ours) = (step(engine, seed, size=size) for engine in (plain, graphed))
        assert again == pytest.approx(loss, rel=1e-3)
        assert error(ours, expected) < 0.02  # compiled, bf16 is rounded in fewer places


def test_gradients_are_those_of_plain_layers_and_each_pass_is_a_launch():
    """Three micro-batches a step; all are replayed from the second step on, over memory that others have used."""
    plain, graphed = prepared(*WORDS, "compile=false"), prepared(*RECORDED)
    assert graphed.plan.recorded
    assert_same_steps(plain, graphed, range(4))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step(graphed, 4)
    launches = sum(event.count for event in profile.key_averages() if "cudaGraphLaunch" in event.key)
    assert launches == 2 * 3, "a forward and a backward of each micro-batch"


@pytest.mark.slow  # three compilations
def test_validations_and_a_smaller_size_change_nothing():
    plain, graphed = prepared(*WORDS, "compile=false"), prepared(*RECORDED)
    for size in (4, 2):
        for seed in range(3):
            assert_same_steps(plain, graphed, [seed], size)
            found = []
            for engine in (plain, graphed):
                with torch.no_grad(), engine.plan.backend.forward_context():
                    found.append([engine.loss(tokens(4, seed=n, n_positions=128)) for n in (7, 8, 9)])
            ours, theirs = ([loss.item() for loss in losses] for losses in found)
            assert ours == pytest.approx(theirs, rel=1e-3)
            assert len(set(theirs)) == 3
        graphed.discard()

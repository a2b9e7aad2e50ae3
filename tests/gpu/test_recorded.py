"""torch.compile's own CUDA graphs (`compile_mode=reduce-overhead`): steps, validation and new sizes as without them."""

import pytest
import torch

from gpt2_fp8.backends.resolve import resolve
from gpt2_fp8.measure import worker
from tests.gpu.common import VOCAB, composed, error, grads, prepared, tokens

WORDS = ["precision=bf16", "compile=true", "model.n_layer=1"]
MODE = "compile_mode=reduce-overhead"


def step(engine, seed, size):
    engine.model.zero_grad(set_to_none=True)
    loss = engine.of_step(tokens(12, seed, 128), size)
    return loss.item(), {name: gradient.clone() for name, gradient in grads(engine.model).items()}


def test_gradients_are_those_without_graphs_with_validations_in_between_and_after_a_new_size():
    """Three micro-batches a step; each is replayed from the third on, over memory that the ones before have used."""
    plain, graphed = prepared(*WORDS), prepared(*WORDS, MODE)
    assert graphed.plan.backend.recorded
    for size in (4, 2):
        for seed in range(4):
            (loss, expected), (again, ours) = step(plain, seed, size), step(graphed, seed, size)
            assert again == pytest.approx(loss, rel=1e-4)
            assert error(ours, expected) < 1e-2  # the GPU adds in no fixed order
            with torch.no_grad(), graphed.plan.backend.forward_context():
                losses = [graphed.loss(tokens(4, seed=n, n_positions=128)) for n in (7, 8, 9)]
                theirs = [plain.loss(tokens(4, seed=n, n_positions=128)) for n in (7, 8, 9)]
            assert [x.item() for x in losses] == pytest.approx([x.item() for x in theirs], rel=1e-4)
        for engine in (plain, graphed):
            engine.discard()


def test_it_launches_graphs():
    engine = prepared(*WORDS, MODE)
    for seed in range(3):
        step(engine, seed, 4)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step(engine, 3, 4)
    launches = sum(event.count for event in profile.key_averages() if "cudaGraphLaunch" in event.key)
    assert launches == 2 * 3, "a forward and a backward of each micro-batch"


def test_training_learns_as_without_graphs():
    losses = []
    for words in (WORDS, [*WORDS, MODE]):
        config = composed(*words)
        training, results = worker._built(config, resolve(config, "cuda"), VOCAB), []
        training.on_settled.append(results.append)
        for seed in range(5):
            training(tokens(12, seed % 2, 128))
        training.settle()
        losses.append([result.loss.item() for result in results])
        torch.compiler.reset()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][4] < losses[0][0]

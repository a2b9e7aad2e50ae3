"""Every kernel of attention under every set of layers: close to the layers' own, and the one that was asked for."""

import pytest
import torch

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.fp8.resolve import check_attention, resolve
from gpt2_fp8.layers.sdpa import HELD
from tests.gpu.common import composed, error, hopper, prepared, step

HEADS_OF_64 = ["model.n_positions=256", "model.n_layer=1", "cuda_graphs=false"]
LAYERS = {
    "plain": ["precision=bf16", "compile=false"],
    "compiled": ["precision=bf16", "compile=true"],
    "te": ["precision.backend=te"],
    "fused": ["precision.backend=fused"],
}
MARKS = {"te": [pytest.mark.fp8], "fused": [pytest.mark.fp8, hopper], "compiled": [pytest.mark.slow]}
KERNELS = {
    "plain": "sdpa cudnn flash",
    "compiled": "cudnn",
    "te": "sdpa cudnn flash te",
    "fused": "sdpa cudnn flash te",
}
CASES = [
    pytest.param(layers, kernel, marks=MARKS.get(layers, ()))
    for layers, kernels in KERNELS.items()
    for kernel in kernels.split()
]


def kernels_of(work):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages()).lower()


@pytest.mark.parametrize(("layers", "kernel"), CASES)
def test_gradients_are_those_of_the_layers_own_kernel(layers, kernel):
    words = [*HEADS_OF_64, *LAYERS[layers]]
    try:
        engine = prepared(*words, f"attention={kernel}")
    except UserError as refused:  # FlashAttention 4 may be missing
        assert (layers, kernel) == ("fused", "flash")
        pytest.skip(str(refused))
    loss, gradients = step(engine, 1, 256)
    own = [*HEADS_OF_64, *LAYERS["plain" if layers == "compiled" else layers]]
    expected_loss, expected = step(prepared(*own), 1, 256)
    assert loss == pytest.approx(expected_loss, rel=2e-3)
    assert error(gradients, expected) < 0.1
    if kernel in HELD and layers != "fused":
        ran = kernels_of(lambda: step(engine, 2, 256))
        assert ("cudnn" if kernel == "cudnn" else "flash") in ran


@pytest.mark.parametrize("size", [512, 257])
@pytest.mark.parametrize("kernel", [kernel for kernel in HELD if kernel != "math"])  # which has any head size
def test_a_head_size_that_a_kernel_lacks_is_refused_with_what_works(kernel, size):
    words = ["precision=bf16", "model.n_head=1", f"model.head_size={size}"]
    with pytest.raises(UserError) as refused:
        resolve(composed(*words, f"attention={kernel}"), "cuda")
    (problem,) = refused.value.problems
    assert f"attention={kernel} cannot run here" in problem.cause
    nearest = problem.remedy.partition("attention=")[2].partition(",")[0]
    backend = resolve(composed(*words, f"attention={nearest}"), "cuda").backend
    check_attention(backend)


@pytest.mark.parametrize("kernel", ["auto", "sdpa", "cudnn", "flash"])
@pytest.mark.parametrize("options", [[], ["model.dropout=0.1"], ["model.n_head=4", "model.n_kv_head=2"]], ids=" ".join)
def test_what_is_not_refused_runs(kernel, options):
    """torch's own answer about dropout and grouped heads is right."""
    words = ["precision=bf16", "compile=false", *options, f"attention={kernel}"]
    try:
        engine = prepared(*words)
    except UserError:
        assert kernel in HELD
        return
    loss, _ = step(engine, 1)
    assert 0 < loss < 20
    assert "torch's" in engine.plan.backend.kernels(50257)["attention"]

"""A small model and its pieces, for tests on a GPU."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.resolve import BACKENDS, resolve
from gpt2_fp8.fp8.scaling import calibrate
from gpt2_fp8.layers.delayed_scaling import DelayedScaling
from gpt2_fp8.model.gpt2 import initialise
from gpt2_fp8.model.loss import NO_PENALTY
from gpt2_fp8.model.loss import loss_of as backends_loss

VOCAB = 50257
CONFIG = ModelConfig(
    name="test", n_layer=3, n_head=4, n_embd=256, n_positions=256, vocab_size=None, dropout=0.0, bias=True
)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="the fused layers are made for Hopper")
bf16 = partial(torch.autocast, "cuda", torch.bfloat16)
FAMILIES = ["te", pytest.param("fused", marks=hopper)]
# A run whose models are built by its own parts; a step is 12 sequences of 128 tokens.
RUN = [
    "trainer=gpu", "model.n_layer=2", "model.n_embd=128", "model.n_head=2", "model.n_positions=128",
    "global_batch_size=12", "micro_batch_size=4", "trainer.max_steps=12", "trainer.val_check_interval=5",
    "optim.warmup_steps=2", "precision.fallback=error",
]  # fmt: skip


def composed(*overrides):
    plain = {"precision=bf16", "precision=fp32"} & set(overrides)
    base = [word for word in RUN if not (plain and word.startswith("precision."))]
    (config,) = compose.preflight([*base, *overrides])
    return config


def scaling(precision="fp8_hybrid"):
    """The fused layers' settings, as conf/recipe/delayed.yaml has them."""
    gradient = torch.float8_e5m2 if precision == "fp8_hybrid" else torch.float8_e4m3fn
    return DelayedScaling(16, margin=0, most_recent=False, forward=torch.float8_e4m3fn, gradient=gradient)


def computing(
    name, keep_bf16=(), config=CONFIG, precision="fp8_hybrid", recompute="none", recipe="delayed", backward="fp8"
):
    """The backend of a run of a model `config`, by the backend's name."""
    run = composed(f"precision={precision}", f"recipe={recipe}")
    run = replace(
        run, model=config, precision=replace(run.precision, keep_bf16=list(keep_bf16), backward=backward),
        activation_checkpointing=recompute,
    )  # fmt: skip
    return BACKENDS[name](run, "bf16" if name == "reference" else precision, "cuda")


def build(backend, *arguments, **options):
    model = computing(backend, *arguments, **options).build(VOCAB).cuda()
    initialise(model, seed=1)
    return model


def loss_of(model, fused):
    """The backends' own loss of a model. `fused`: its logits become their gradient where it has any."""
    return lambda ids, first=None, scale=1.0: backends_loss(model, ids, first, scale, fused, NO_PENALTY)


def tokens(batch=16, seed=0, n_positions=256):
    """Zipf-like token ids [batch, n_positions + 1], int32: a few frequent, many rare, as in text."""
    generator = torch.Generator().manual_seed(seed)
    return (VOCAB ** torch.rand(batch, n_positions + 1, generator=generator) - 1).int().cuda()


def calibrated(backend, recipe="delayed", precision="fp8_hybrid", ids=None, **settings):
    """A model with its scales found on `ids`, and its backend."""
    fp8 = computing(backend, recipe=recipe, precision=precision, **settings)
    model = build(backend, recipe=recipe, precision=precision, **settings)
    calibrate(model, loss_of(model, True), tokens() if ids is None else ids, fp8.forward_context)
    return model, fp8


def prepared(*overrides):
    """What computes the gradients of a run, its scales found where it has any; `micro_batch_size` is the run's."""
    config = composed(*overrides)
    plan = resolve(config, "cuda")
    with torch.device("cuda"):
        model = plan.backend.build(VOCAB)
    initialise(model, seed=1)
    made = Gradients(plan, model, plan.backend.scaling(model), torch.Tensor.backward)
    made.micro_batch_size = config.micro_batch
    if plan.fp8:
        made.calibrate(tokens(12, 0, 128), made.micro_batch_size)
        made.scaling.ready = True
    return made


@contextmanager
def evaluating(model, fp8):
    """As the LightningModule evaluates."""
    model.eval()
    with torch.no_grad(), state.unchanged(model), fp8.forward_context():
        yield
    model.train()


@contextmanager
def determinism():
    """Every kernel that can be is deterministic, and what torch leaves uninitialised is NaN, so that reading it shows.

    It warns where torch has no such kernel: what is compared then is left to the test.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def grads(model):
    return {name: p.grad.float().clone() for name, p in model.named_parameters()}


def step(engine, seed, n_positions=128, size=None):
    """Loss and gradients of an optimizer step of what is `prepared`, without its update."""
    engine.model.zero_grad(set_to_none=True)
    return engine.of_step(tokens(12, seed, n_positions), size or engine.micro_batch_size).item(), grads(engine.model)


def gradients(model, ids, fused, context, first=None, scale=1.0, upstream=1.0):
    """Loss and float32 gradients by name of one forward and backward."""
    model.zero_grad(set_to_none=True)
    with context():
        loss = loss_of(model, fused)(ids, first, scale)
    (loss if upstream == 1.0 else loss * upstream).backward()
    return loss.item(), grads(model)


def norm(gradients):
    return torch.stack([g.norm() for g in gradients.values()]).norm().item()


def error(ours, expected):
    """How far gradients lie from others, as a part of those: norms over all parameters."""
    assert ours.keys() == expected.keys()
    assert all(torch.isfinite(gradient).all() for gradient in ours.values())
    return norm({name: ours[name] - expected[name] for name in expected}) / norm(expected)


def assert_same_tensors(ours, expected):
    assert ours.keys() == expected.keys()
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []


def assert_like_bf16(backend, ids=None, config=CONFIG, rel=2e-3, most=0.12, **settings):
    """Hold an FP8 model, its scales found on `ids`, to bf16's loss and gradients; return it, its backend and both.

    Three mantissa bits in every product make the gradients differ by some 0.07.
    """
    ids = tokens() if ids is None else ids
    expected_loss, expected = gradients(build("reference", config=config), ids, False, bf16)
    model, fp8 = calibrated(backend, ids=ids, config=config, **settings)
    loss, ours = gradients(model, ids, True, fp8.forward_context)
    assert loss == pytest.approx(expected_loss, rel=rel)
    assert 0 < error(ours, expected) < most
    return model, fp8, ours, expected

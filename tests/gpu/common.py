"""A small model and its pieces, for tests on a GPU."""

from contextlib import contextmanager

import torch

from gpt2_fp8 import layers
from gpt2_fp8.config.schema import DelayedRecipe, FP8PrecisionConfig, ModelConfig, StatelessRecipe
from gpt2_fp8.loss import cross_entropy, split
from gpt2_fp8.model import GPT2, initialise
from gpt2_fp8.precision.plugin import FP8Precision
from gpt2_fp8.precision.recipes import build_recipe

VOCAB = 50257
CONFIG = ModelConfig(
    name="test", n_layer=3, n_head=4, n_embd=256, n_positions=256, vocab_size=None, dropout=0.0, bias=True
)


def build(backend, keep_bf16=(), config=CONFIG):
    model = GPT2(config, VOCAB, layers.load(backend), keep_bf16).cuda()
    initialise(model, seed=1)
    return model


def loss_of(model, fused):
    def loss(ids, first=None, scale=1.0):
        inputs, targets = split(ids)
        return cross_entropy(model(inputs, first), targets, VOCAB, fused, scale)

    return loss


def tokens(batch=16, seed=0, n_positions=256):
    """Zipf-like token ids [batch, n_positions + 1], int32: a few frequent, many rare, as in text."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(batch, n_positions + 1, generator=generator)
    return (VOCAB**uniform - 1).int().cuda()


def plugin(recipe="delayed", precision="fp8_hybrid"):
    """The precision plugin of a run, as `build_plugin` makes it."""
    chosen = FP8PrecisionConfig(name=precision, keep_bf16=[], layers="auto", fallback="error")
    if recipe == "delayed":
        config = DelayedRecipe(name="delayed", margin=0, amax_history_len=16, amax_compute_algo="max")
        return FP8Precision(build_recipe(chosen, config), "delayed")
    return FP8Precision(build_recipe(chosen, StatelessRecipe(name=recipe)), None)


@contextmanager
def bf16():
    with torch.autocast("cuda", torch.bfloat16):
        yield


def gradients(model, ids, fused, context):
    """Loss and float32 gradients by name of one forward and backward."""
    model.zero_grad(set_to_none=True)
    with context():
        loss = loss_of(model, fused)(ids)
    loss.backward()
    return loss.item(), {name: p.grad.float().clone() for name, p in model.named_parameters()}


def norm(gradients):
    return torch.stack([g.norm() for g in gradients.values()]).norm().item()

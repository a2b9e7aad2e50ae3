"""A model small enough for a test, and its data."""

import torch

from gpt2_fp8.config.schema import ModelConfig, OptimConfig
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import GPT2, initialise
from gpt2_fp8.model.loss import cross_entropy, split

VOCAB = 257
CONFIG = ModelConfig(
    name="test", n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=None, dropout=0.0, bias=True
)
OPTIM = OptimConfig(
    lr=1e-2, min_lr_ratio=0.1, warmup_steps=5, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, max_grad_norm=1.0
)


def build(config=CONFIG, seed=1):
    model = GPT2(config, VOCAB, Composed(reference, recompute="none"))
    initialise(model, seed)
    return model


def ids(sequences=8, seed=0, length=CONFIG.n_positions + 1):
    return torch.randint(
        0, VOCAB, (sequences, length), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)
    )


def loss_of(model):
    def loss(ids, is_first_microbatch=None, scale=1.0):
        inputs, targets = split(ids)
        return cross_entropy(model(inputs, is_first_microbatch), targets, VOCAB, False, scale)

    return loss

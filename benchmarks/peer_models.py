"""GPT-2 as others train it: what each peer computes. `peers.py` runs the loop around them.

A builder takes the model's configuration, the tokenizer's vocabulary size and the device. Every vocabulary is padded as
this project's is, since all peers are faster with it. Losses include the padding's columns, as the peers' own do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_fp8.config import hf_config
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.fp8.support import why_not_te_fp8
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.layers.reference import Attention
from gpt2_fp8.model.gpt2 import GPT2, INITIAL_STD, initialise, padded_vocabulary
from gpt2_fp8.model.loss import cross_entropy


@dataclass
class Peer:
    """A model and its loss.

    `loss(inputs, targets, first)`: the mean over a micro-batch of int64 [sequences, tokens], inside whatever autocast
    the peer uses. `first`: whether it is a step's first micro-batch.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor, bool], Tensor]
    note: str  # what a reader of its row should know
    backward: Callable[[Tensor], object] = Tensor.backward


class PlainBlock(nn.Module):
    """A block of nn.LayerNorm, nn.Linear and GELU (tanh). x: [batch, tokens, n_embd]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        spec, d, bias = block_spec(config), config.n_embd, config.bias
        self.norm_1, self.norm_2 = (nn.LayerNorm(d, spec.norm.epsilon) for _ in range(2))
        self.qkv, self.projection = nn.Linear(d, spec.heads.packed, bias), nn.Linear(spec.heads.queries, d, bias)
        self.fc1, self.fc2 = nn.Linear(d, spec.mlp.projected, bias), nn.Linear(spec.mlp.width, d, bias)
        self.attention = Attention(spec.heads, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        x = x + self.dropout(self.projection(self.attention(self.qkv(self.norm_1(x)))))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm_2(x)), approximate="tanh")))


class PlainGPT2(nn.Module):
    """GPT-2 of torch's own modules, as nanoGPT writes it, for libraries that replace `nn.Linear` in a finished model.

    `blocks` and `head` may come from another library; such a head contains its normalisation.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, blocks: list[nn.Module], head: nn.Module, norm: nn.Module):
        super().__init__()
        self.tokens = nn.Embedding(padded_vocabulary(vocab_size), config.n_embd)
        self.positions = nn.Embedding(config.n_positions, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), norm, head
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                into_residual = name.endswith(("projection.weight", "fc2.weight", "proj.weight", "fc2_weight"))
                nn.init.normal_(parameter, 0.0, INITIAL_STD / math.sqrt(2 * config.n_layer) ** into_residual)

    def forward(self, inputs: Tensor, targets: Tensor, **to_layers: Any) -> Tensor:
        """Compute the mean loss, as nanoGPT's forward does."""
        logits = self.logits(inputs, **to_layers)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def logits(self, inputs: Tensor, **to_layers: Any) -> Tensor:
        """Compute logits [batch, tokens, padded vocabulary]. `to_layers` are passed to every block and to the head."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, **to_layers)
        return self.head(self.norm(x), **to_layers)


def plain_gpt2(config: ModelConfig, vocab_size: int) -> PlainGPT2:
    """Build the model of torch's own modules on the default device."""
    rows, d, epsilon = padded_vocabulary(vocab_size), config.n_embd, block_spec(config).norm.epsilon
    blocks: list[nn.Module] = [PlainBlock(config) for _ in range(config.n_layer)]
    return PlainGPT2(config, vocab_size, blocks, nn.Linear(d, rows, bias=False), nn.LayerNorm(d, epsilon))


def transformers_model(config: ModelConfig, vocab_size: int, device: str) -> Peer:
    """Build transformers' class for the model: GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM."""
    import transformers as library

    spec = block_spec(config)
    architecture = next((a for a in hf_config.ARCHITECTURES if not hf_config.misfits(spec, a)), None)
    if architecture is None and hf_config.misfits(spec, hf_config.GPT2) == ["always biases"]:
        architecture = hf_config.GPT2
    if architecture is None:
        raise ValueError("none of its classes computes this model")
    keys = hf_config.to_hf(config, architecture, padded_vocabulary(vocab_size), separator=None)
    settings = library.AutoConfig.for_model(keys.pop("model_type"), **keys)
    settings.use_cache = False
    with torch.device(device):
        model = library.AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa", dtype=torch.float32)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    biases = "; it has biases, whatever model.bias says" if architecture is hf_config.GPT2 and not config.bias else ""
    return _compiled(model, loss, device, f"{architecture.name}, sdpa attention{biases}")


def torchao_float8(config: ModelConfig, vocab_size: int, device: str) -> Peer:
    """Build the plain model with torchao's tensorwise float8 in every `nn.Linear`. The head stays tied."""
    from torchao import float8 as library

    with torch.device(device):
        model = plain_gpt2(config, vocab_size)
    library.convert_to_float8_training(model, config=library.Float8LinearConfig.from_recipe_name("tensorwise"))
    return _compiled(model, model, device, "tensorwise, every nn.Linear and the tied head")


def lightning_transformer_engine(config: ModelConfig, vocab_size: int, device: str) -> Peer:
    """Build the plain model under Lightning's precision="transformer-engine", through Fabric."""
    _needs_fp8(device)
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cuda", devices=1, precision="transformer-engine")
    with torch.device(device):
        plain = plain_gpt2(config, vocab_size)
    model = fabric.setup_module(plain)
    note = "eager; bf16 weights without masters; the plugin copies weights, which unties the head from the embedding"
    return Peer(model, lambda inputs, targets, first: model(inputs, targets), note, fabric.backward)


def plain_torch(config: ModelConfig, vocab_size: int, device: str) -> Peer:
    """Build this project's model in plain torch, for a bare loop."""
    with torch.device(device):
        model = GPT2(config, vocab_size, Composed(reference, recompute="none"))
    initialise(model, seed=0)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs), targets, vocab_size, fused=False)

    return _compiled(model, loss, device, "this project's reference layers")


def transformer_engine(config: ModelConfig, vocab_size: int, device: str) -> Peer:
    """Build a stack of te.TransformerLayer, with Transformer Engine's own head and cross-entropy."""
    _needs_fp8(device)
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    spec, d, width = block_spec(config), config.n_embd, {"bias": config.bias, "params_dtype": torch.float32}
    blocks = [
        te.TransformerLayer(
            d, spec.mlp.width, config.n_head, hidden_dropout=config.dropout, attention_dropout=config.dropout,
            layernorm_epsilon=spec.norm.epsilon, fuse_qkv_params=True, attn_input_format="bshd", **width,
        )
        for _ in range(config.n_layer)
    ]  # fmt: skip
    head = te.LayerNormLinear(d, padded_vocabulary(vocab_size), bias=False, params_dtype=torch.float32)
    model = PlainGPT2(config, vocab_size, blocks, head, nn.Identity()).to(device)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")

    def loss(inputs: Tensor, targets: Tensor, first: bool) -> Tensor:
        with _bf16(device), te.autocast(enabled=True, recipe=recipe):
            logits = model.logits(inputs, is_first_microbatch=first)
        return te.parallel_cross_entropy(logits, targets, reduce_loss=True, overwrite_input=True)

    note = "te.TransformerLayer, delayed scaling over 16 steps, FP8 head, te.parallel_cross_entropy; scales start at 1"
    return Peer(model, loss, note)


def _compiled(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], device: str, note: str) -> Peer:
    """Build a peer in bf16 autocast, compiled; on a CPU in float32, not compiled."""
    compiled = torch.compile(loss) if device == "cuda" else loss

    def of(inputs: Tensor, targets: Tensor, first: bool) -> Tensor:
        with _bf16(device):
            return compiled(inputs, targets)

    how = "bf16 autocast, torch.compile" if device == "cuda" else "float32, not compiled"
    return Peer(model, of, f"{note}; {how}")


def _bf16(device: str) -> AbstractContextManager:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def _needs_fp8(device: str) -> None:
    """Raise ValueError if Transformer Engine, or something that it needs, is missing."""
    if reason := why_not_te_fp8():
        raise ValueError(reason)


OURS, TRANSFORMERS = "plain torch", "transformers"
ANY_MODEL = (OURS, TRANSFORMERS)  # the others are GPT-2
# The builder of each, and the package that tells its version.
PEERS: dict[str, tuple[Callable[[ModelConfig, int, str], Peer], str]] = {
    OURS: (plain_torch, "torch"),
    TRANSFORMERS: (transformers_model, "transformers"),
    "torchao float8": (torchao_float8, "torchao"),
    "Lightning transformer-engine": (lightning_transformer_engine, "lightning"),
    "Transformer Engine": (transformer_engine, "transformer_engine"),
}

"""A decoder of pre-norm blocks: GPT-2 (Radford et al. 2019), or with the options of Llama 3 and Qwen3."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_fp8.config.block_spec import RoPE, block_spec
from gpt2_fp8.config.kept_layers import parse_kept
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.layers.delayed_scaling import Scales
from gpt2_fp8.layers.reference import angles
from gpt2_fp8.layers.sdpa import within_documents
from gpt2_fp8.model.parameters import parameters

VOCABULARY_MULTIPLE = 64  # FP8 GEMMs need dimensions divisible by 16; 64 also fills their kernels' tiles
INITIAL_STD = 0.02
_AT_ONCE = 4  # tensors whose values are drawn at once: 8 billion take a minute one after the other


def padded_vocabulary(vocab_size: int) -> int:
    """Return the padded vocabulary's size: `vocab_size` rounded up. The embedding has that many rows."""
    return math.ceil(vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


class GPT2(nn.Module):
    """The model. `vocab_size` is the tokenizer's; logits have `padded_vocabulary(vocab_size)` columns.

    The caller must ignore the columns from `vocab_size` on (`loss.cross_entropy` does). `keep_bf16` names layers that
    stay out of FP8 (`config.kept_layers`). `separator`: the id that ends a document, if tokens attend within their
    document alone; None if they attend to all before them. `separator_begins`: it begins a document instead. `built` is
    called with each block before the next one is built.
    """

    def __init__(
        self, config: ModelConfig, vocab_size: int, layers: Composed, keep_bf16: Iterable[str] = (),
        separator: int | None = None, separator_begins: bool = False,
        built: Callable[[nn.Module], object] = lambda block: None,
    ):  # fmt: skip
        super().__init__()
        self.separator, self.separator_begins = separator, separator_begins
        self.config, self.vocab_size, self.spec = config, vocab_size, block_spec(config)
        in_bf16 = parse_kept(keep_bf16, config.n_layer)
        self.tokens = nn.Embedding(padded_vocabulary(vocab_size), config.n_embd)
        self.positions = None
        if self.spec.positions == "learned":
            self.positions = nn.Embedding(config.n_positions, config.n_embd)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList()
        for i in range(config.n_layer):
            self.blocks.append(layers.block(self.spec, in_bf16.in_fp8(i)))
            built(self.blocks[i])
        self.head = layers.head(self.spec, self.tokens.num_embeddings, fp8=not in_bf16.head)
        device = next(self.head.parameters()).device
        self.tokens.to(device)
        if self.positions is not None:
            self.positions.to(device)
        self._embed, self._turns, self.scales = layers.embed, layers.turns, layers.scales
        if isinstance(self.scales, Scales):
            self.scales.allocate(device)
        if self.spec.tied:
            self.head.weight = self.tokens.weight
            self.register_state_dict_post_hook(_leave_out_tied)
            self.register_load_state_dict_pre_hook(_put_in_tied)

    def forward(self, ids: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute logits [batch, tokens, padded vocabulary], in the autocast dtype or else the parameters'.

        ids: integers [batch, tokens], tokens <= n_positions. `is_first_microbatch`: True quantizes the weights to FP8
        and keeps the FP8 copies, False uses them again, None quantizes without keeping.
        """
        return self.head(self.hidden_states(ids, is_first_microbatch), is_first_microbatch)

    def hidden_states(
        self, ids: Tensor, is_first_microbatch: bool | None = None, outputs: list[Tensor] | None = None
    ) -> Tensor:
        """Compute the head's input: [batch, tokens, n_embd]. Arguments as `forward`'s.

        If `outputs` is a list, each block's output is appended to it, of the same shape.
        """
        if isinstance(self.scales, Scales):
            self.scales.begin(is_first_microbatch)
        x, given = self.dropout(self.embed(ids)), self._shared_inputs(ids)
        for block in self.blocks:
            x = block(x, is_first_microbatch, *given)
            if outputs is not None:
                outputs.append(x)
        return x

    def as_forward(self, compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return `compute(self, *inputs)` as a forward of the model: FSDP gathers the parameters around it."""
        return compute(self, *inputs)

    def embed(self, ids: Tensor) -> Tensor:
        """Compute the start of the residual stream of ids [batch, tokens], at positions from 0 on, without dropout."""
        table = None if self.positions is None else self.positions.weight
        return self._embed(ids, self.tokens.weight, table)

    def _shared_inputs(self, ids: Tensor) -> tuple[Any, ...]:
        """Compute once what all blocks are given: nothing, what RoPE turns by, or this (or None) and the mask."""
        rope, angle = self.spec.positions, None
        if isinstance(rope, RoPE):
            angle = self._turns(angles(rope, self.spec.heads.size, ids.shape[1], ids.device))
        if self.separator is None:
            return () if angle is None else (angle,)
        device = ids.device.type
        in_autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if in_autocast else self.tokens.weight.dtype
        return angle, within_documents(ids, self.separator, dtype, self.separator_begins)


def _leave_out_tied(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state.pop(f"{prefix}head.weight", None)


def _put_in_tied(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if f"{prefix}tokens.weight" in state:
        state.setdefault(f"{prefix}head.weight", state[f"{prefix}tokens.weight"])


@torch.no_grad()
def initialise(model: GPT2, seed: int, fill: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
    """Fill every parameter. Values depend only on `seed` and the parameter's name.

    `fill(parameter, values)` copies float32 values of a whole parameter, on the CPU, into it.

    Weights are N(0, 0.02). With `depth_scaled_init`, as in GPT-2, the two projections into the residual stream are
    divided by sqrt(2 n_layer). Llama and Qwen leave that out in Hugging Face's code, and OLMo 2 found the training more
    stable without it (OLMo et al. 2025, arXiv 2501.00656). Biases are 0, normalisation weights 1. So every backend,
    device and order of construction gives the same values.
    """
    config, padded_vocab_size = model.config, model.tokens.num_embeddings
    roles = {p.name: p.role for p in parameters(config, padded_vocab_size)}

    def draw(named: tuple[str, Tensor]) -> Tensor:
        name, parameter = named
        # The device is named because Lightning sets a default device here.
        values = torch.zeros(parameter.shape, device="cpu")
        if roles[name] == "norm":
            values.fill_(1.0)
        elif roles[name] != "bias":
            into_residual = roles[name] == "into_residual" and config.depth_scaled_init
            std = INITIAL_STD / math.sqrt(2 * config.n_layer) if into_residual else INITIAL_STD
            values.normal_(0.0, std, generator=torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode())))
        if name in ("tokens.weight", "head.weight"):
            values[model.vocab_size :].zero_()
        return values

    every = list(model.named_parameters())
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for start in range(0, len(every), _AT_ONCE):
            some = every[start : start + _AT_ONCE]
            for (_, parameter), values in zip(some, pool.map(draw, some), strict=True):
                fill(parameter, values)

"""The interface of every backend. Everything that differs between two ways to compute a model is behind this class.

What a plan (`fp8.resolve`) and the training step ask of a backend: name, config, recipe, compiled, compile_options,
graphs, why_not, why_not_attention, kernels, build, loss, bf16_model, bf16_loss, scaling and forward_context. The rest
is between `Backend` and its subclasses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gpt2_fp8.config import data_schema, tokenizer_file
from gpt2_fp8.config.backend_support import ON_A_GPU
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import AttentionKernel, AutoRecipe, DelayedRecipe, FP8PrecisionConfig, Recompute, RunConfig
from gpt2_fp8.fp8.recipes import Recipe
from gpt2_fp8.fp8.scaling import FP8Scaling
from gpt2_fp8.layers import reference, sdpa
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import GPT2
from gpt2_fp8.model.loss import loss_of
from gpt2_fp8.runtime import collectives
from gpt2_fp8.runtime.sharding import Sharding, is_divided, lend

Device = Literal["cuda", "cpu"]
Ran = Literal["fp32", "bf16", "fp8_hybrid", "fp8_e4m3"]
LossOf = Callable[[Tensor, bool | None, float], Tensor]


class Backend(ABC):
    """Computes the model of one run in one precision on one device.

    Attributes:
        name: the value of `precision.backend` that chooses it.
        compiled: whether `torch.compile` compiles its loss.
        compile_options: options of `torch.compile` for that.
        fp8: whether GEMMs run in FP8.
        recompute: what is computed again in the backward.
        keep_bf16: names of the layers whose GEMMs stay in bf16.
        attention_shape: the heads, the tokens and the dropout of attention.
        graphs: whether this run's micro-batches are recorded and replayed.
        fused_loss: whether the loss overwrites the logits with their gradient (`kernels.cross_entropy`; CUDA only).
        keeps_weights: whether layers may keep FP8 weights from one micro-batch of a step to the next.
        recipe: how FP8 tensors get their scales: the configured recipe, or this backend's own if that is `auto`;
            None if nothing is scaled.
    """

    name: ClassVar[str]
    fused_loss: bool = True
    keeps_weights: bool = True
    compile_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: RunConfig, ran: Ran, device: Device):
        self.config, self.ran, self.device = config, ran, device
        self.compiled = self.graphs = False
        self.fp8, self.recompute = ran.startswith("fp8"), config.activation_checkpointing
        self.keep_bf16 = config.precision.keep_bf16 if isinstance(config.precision, FP8PrecisionConfig) else []
        self.attention_shape = block_spec(config.model).heads, config.model.n_positions, config.model.dropout
        self.recipe = self.own_recipe(config.recipe) if isinstance(config.recipe, AutoRecipe) else config.recipe

    def own_recipe(self, auto: AutoRecipe) -> Recipe | None:
        """Return the recipe of a run that names none; None if nothing is scaled."""
        return auto.delayed

    @classmethod
    def why_not(cls, config: RunConfig) -> str | None:
        """Return why it cannot compute `config` on this machine; None if it can. The machine can do the precision."""
        return None

    @abstractmethod
    def family(self) -> Composed:
        """Return the layers from which `build` makes the model."""

    @abstractmethod
    def kernels(self, vocab_size: int, micro_batch: int | None = None) -> dict[str, str]:
        """Describe what computes each part of the model, by the part; the first key is `layers`.

        `micro_batch`: sequences of a forward in training; None: those of the settings.
        """

    @property
    def precision(self) -> FP8PrecisionConfig:
        """The settings of a run whose precision is FP8."""
        assert isinstance(self.config.precision, FP8PrecisionConfig)
        return self.config.precision

    def why_not_attention(self, kernel: AttentionKernel) -> str | None:
        """Return why these layers cannot take a kernel of attention on this machine; None if they can."""
        if kernel in ON_A_GPU and self.device != "cuda":
            return "its kernels are a GPU's, and this run is on the CPU"
        if kernel in ON_A_GPU and self.ran == "fp32":
            return "its kernels take bfloat16, and this run is in fp32"
        return None if kernel == "auto" else self.why_no_kernel(kernel)

    def why_no_kernel(self, kernel: AttentionKernel) -> str | None:
        """Return why these layers have not got a kernel that is asked for; here what torch says of its own."""
        if kernel == "te":
            return "these layers have only torch's kernels"
        return sdpa.why_not(kernel, *self.attention_shape) if kernel in sdpa.HELD else None

    def torch_attention(self) -> str:
        """Name the kernel that torch runs for `attention`, for people."""
        dtype = torch.float32 if self.ran == "fp32" else torch.bfloat16
        masked = self.config.document_mask
        said = sdpa.kernels(self.kernel, *self.attention_shape, dtype, self.device, masked)
        return f"{said}, within documents" if masked else said

    def build(self, vocab_size: int, sharding: Sharding | None = None) -> GPT2:
        """Build the model on torch's default device, with uninitialised parameters.

        With `sharding` it is divided among the ranks. Each block is as soon as it is there: a GPU may not have room for
        all of them. What runs between its units cannot be compiled with them, so the loss has its own kernel.
        """
        separator = self._separator()
        begins = separator is not None and data_schema.begin_with_separator(self.config.data)
        options = self.config.model, vocab_size, self.family(), self.keep_bf16, separator, begins
        if sharding is None:
            return GPT2(*options)
        self.fused_loss = self.device == "cuda" and self.ran != "fp32"
        model = GPT2(*options, built=sharding.divide)
        if not model.spec.tied:
            sharding.divide(model.head, reshard=False)  # its backward follows at once
        sharding.divide_rest(model, model.spec.tied)
        return model

    def _separator(self) -> int | None:
        """Return the id at a document's border, for attention; None without `document_mask`. Raises UserError."""
        if not self.config.document_mask:
            return None
        name = self.config.data.tokenizer
        if (found := tokenizer_file.separator(name)) is None:
            cause = f"document_mask=true, and the tokenizer {name} is not there to say which id ends a document"
            raise UserError.of(cause, "put it back, or data.tokenizer=PATH")
        return found

    @property
    def kernel(self) -> AttentionKernel:
        """What computes attention: with a mask, the kernels that torch chooses, or the formula if asked for."""
        kernel = self.config.attention
        return "sdpa" if self.config.document_mask and kernel != "math" else kernel

    def loss(
        self, model: GPT2, ids: Tensor, is_first_microbatch: bool | None = None, scale: float = 1.0,
        targets: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute `scale` times the mean loss over the targets of `ids` [sequences, n_positions + 1], float32.

        With gradients, the run's penalties are part of it, and with any it is [3]: see `model.loss`. Call it inside
        `forward_context`. `is_first_microbatch`: see `GPT2.forward`; where no weight is kept in FP8 it has no effect,
        and `torch.compile` makes one graph instead of three.
        """
        is_first_microbatch = is_first_microbatch if self.fp8 and self.keeps_weights else None
        return loss_of(model, ids, is_first_microbatch, scale, self.fused_loss, self.config.penalty, targets)

    def bf16_model(self, model: GPT2) -> GPT2:
        """Return what computes in bf16 with the parameters of `model`, of an FP8 run, without FP8.

        It is a twin of plain-torch layers: those of the run have no bf16. Its attention is the run's, unless the
        run's layers alone have that.
        """
        return twin_of(model, self.recompute, "auto" if Backend.why_no_kernel(self, self.kernel) else self.kernel)

    def bf16_loss(
        self, model: GPT2, ids: Tensor, scale: float, compiled: bool = False, targets: Tensor | None = None
    ) -> Tensor:
        """Compute `loss` with a model of `bf16_model`. Call it inside `forward_context(fp8=False)`.

        `compiled`: `torch.compile` compiles it. Then it has the kernels of a run in bf16, whose loss is not fused.
        """
        return loss_of(model, ids, None, scale, ids.is_cuda and not compiled, self.config.penalty, targets)

    def scaling(self, model: GPT2) -> FP8Scaling:
        """Return the owner of the model's FP8 scales."""
        if not self.fp8 or not isinstance(self.recipe, DelayedRecipe):
            return FP8Scaling.of_nothing()
        settings = f"{self.precision.name}, {self.recipe}, {sorted(self.keep_bf16)}, {self.name}"
        share = self.config.global_batch_size // collectives.rank_and_world()[1]
        return FP8Scaling(model, settings, share, self.forward_context)

    @contextmanager
    def forward_context(self, fp8: bool = True) -> Iterator[None]:
        """Enter the precision of one forward; `fp8=False`: bfloat16's alone. The backward runs outside this context."""
        with self.bf16_context(), self.fp8_region() if fp8 else nullcontext():
            yield

    def bf16_context(self) -> AbstractContextManager:
        """Enter only bfloat16 autocast; nothing under fp32."""
        return nullcontext() if self.ran == "fp32" else torch.autocast(self.device, torch.bfloat16)

    def fp8_region(self) -> AbstractContextManager:
        """Enter the region in which layers compute in FP8."""
        return nullcontext()


def compiles_plain(config: RunConfig, device: Device) -> bool:
    """Return whether plain-torch layers run under `torch.compile` (`compile`)."""
    return device == "cuda" if config.compile == "auto" else config.compile


def twin_of(model: GPT2, recompute: Recompute = "none", kernel: AttentionKernel = "auto") -> GPT2:
    """Build a model of the reference layers that shares the parameters of `model`, tied ones included.

    `kernel`: what computes attention.
    """
    with torch.device("meta"):
        layers, borders = Composed(reference, recompute, kernel), (model.separator, model.separator_begins)
        twin = GPT2(model.config, model.vocab_size, layers, (), *borders)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, _ in list(twin.named_parameters(remove_duplicate=False)):
        place, _, last = name.rpartition(".")
        setattr(twin.get_submodule(place), last, own.pop(name))
    assert not own, "the families have the same parameters"
    if is_divided(model):
        lend(model, twin)
    return twin

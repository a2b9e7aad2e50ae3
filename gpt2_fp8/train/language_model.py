"""The model of a configuration as an `nn.Module`, for a training loop of one's own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.cuda_graphs import compile_function
from gpt2_fp8.engine.evaluation import in_mode
from gpt2_fp8.fp8.resolve import Plan, resolve
from gpt2_fp8.fp8.scaling import FP8Scaling
from gpt2_fp8.model.gpt2 import GPT2, initialise
from gpt2_fp8.model.loss import trained_loss
from gpt2_fp8.runtime import devices
from gpt2_fp8.train import huggingface


class LanguageModel(nn.Module):
    """A model that computes in the precision of its configuration: `loss = model(ids, targets); loss.backward()`.

    Parameters are float32, on the device of the configuration, with the initial values of a run or those of
    `init_from`. FP8's first scales are found in the first training forward, which computes twice more. Any optimizer,
    and any loop in one process, will do. CUDA graphs, the smaller micro-batch where memory ends, and the step that is
    repeated in bfloat16 are parts of a run and not of this module.

    Args:
        config: the run's: model, precision, recipe, penalties, attention and compilation are read.
        plan: what computes.
        vocab_size: the tokenizer's.

    Attributes:
        model: the layers. Its `state_dict` has the names of a run's checkpoint.
    """

    def __init__(self, config: RunConfig, plan: Plan, vocab_size: int):
        super().__init__()
        self.config, self.plan, self.vocab_size = config, plan, vocab_size
        with torch.device(plan.device):
            self.model: GPT2 = plan.backend.build(vocab_size)
        initialise(self.model, config.seed)
        self._scaling = plan.backend.scaling(self.model)
        self._loss = self._own_loss
        if plan.backend.compiled:
            self._loss = compile_function(self._own_loss, plan.backend.compile_options)
        self._twin: list[GPT2] = []  # what evaluates in bfloat16, outside of this module's parameters

    @classmethod
    def from_config(cls, config: RunConfig) -> LanguageModel:
        """Build the model of a configuration. Raises UserError if this machine cannot compute what was asked for."""
        plan, vocab_size = resolve(config, devices.device(config)), vocabulary(config)
        if plan.reason is not None:
            warnings.warn(f"{plan.asked} cannot run here, and {plan.ran} trains instead: {plan.reason}", stacklevel=3)
        made = cls(config, plan, vocab_size)
        if config.init_from:
            folder = Path(config.init_from).expanduser()
            made.model.load_state_dict(huggingface.read_weights(folder, config.model, vocab_size))
        return made

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Compute the mean loss over `targets`, a float32 scalar, or the logits without gradients.

        ids: integers [sequences, tokens], tokens <= n_positions; FP8 takes a multiple of 16 in all. targets: of the
        same shape, the token after each; a negative one has no loss. With gradients the penalties of the configuration
        are part of the loss. Without, it is computed in the precision of a run's validations. Without targets: logits
        [sequences, tokens, vocab_size]. Raises UserError for ids of another shape, and for too many tokens.
        """
        check_shape(ids, self.config.model.n_positions)
        ids = ids.long()
        if targets is not None:
            targets = targets.long().clamp_min(-1)  # the one that every layer's loss leaves out
        backend, in_bf16 = self.plan.backend, self.plan.evaluates_in_bf16
        if targets is not None and torch.is_grad_enabled():
            self._find_scales(ids, targets)
            with backend.forward_context():
                return trained_loss(self._loss(ids, targets))
        if not in_bf16:
            self._find_scales(ids, targets)
        context = backend.forward_context(fp8=not in_bf16)
        with torch.no_grad(), self._scaling.unchanged(), context:
            if in_bf16 and not self._twin:
                self._twin.append(backend.bf16_model(self.model))
            model = self._twin[0].train(self.model.training) if in_bf16 else self.model
            if targets is None:
                return model(ids)[..., : self.vocab_size]
            return backend.bf16_loss(model, ids, 1.0, targets=targets) if in_bf16 else self._own_loss(ids, targets)

    def _own_loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.plan.backend.loss(self.model, ids, None, 1.0, targets)

    def _find_scales(self, ids: Tensor, targets: Tensor | None) -> None:
        """Take the scales of a state dict, or find the first ones from this batch, if delayed scaling needs any."""
        if self._scaling.ready or self._scaling.take():
            return
        if targets is None:
            raise UserError.of("the FP8 layers have no scales yet", "a forward with targets finds them")
        assert isinstance(self._scaling, FP8Scaling)
        self._scaling.sequences = len(ids)
        with torch.inference_mode(False), torch.enable_grad(), in_mode(self.model, training=True):
            ids, targets = ids.clone(), targets.clone()
            both = torch.cat([ids, targets[:, -1:]], dim=1)
            self._scaling.calibrate(lambda _: trained_loss(self._own_loss(ids, targets)), both)
        self._scaling.ready = True

    def get_extra_state(self) -> dict[str, Any]:
        """Return the scales of delayed scaling as plain tensors, for `state_dict`."""
        # Without the sequences of a step: a loss here is a mean, whatever the batch.
        return {name: value for name, value in self._scaling.state_dict().items() if name != "sequences"}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Keep the scales of a state dict for the next forward."""
        if state:
            self._scaling.ready = False
            self._scaling.load_state_dict(state)


def check_shape(ids: Tensor, n_positions: int) -> None:
    """Raise UserError unless ids are [sequences, tokens], with at most `n_positions` tokens."""
    if ids.dim() != 2:
        remedy = "ids[None] of one sequence" if ids.dim() == 1 else "ids of shape [sequences, tokens]"
        raise UserError.of(f"ids have the shape {list(ids.shape)}, and the model takes [sequences, tokens]", remedy)
    if (tokens := ids.shape[1]) > n_positions:
        raise UserError.of(f"{tokens} tokens, and the model has {n_positions} positions", f"ids[:, -{n_positions}:]")

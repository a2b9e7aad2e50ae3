"""A text sample after each validation, to show what the loss means."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl

from gpt2_fp8.engine.out_of_memory import is_out_of_memory
from gpt2_fp8.model.generate import decode_after, generate
from gpt2_fp8.runtime import signals

log = logging.getLogger(__name__)


class Samples(pl.Callback):
    """Writes `tokens` tokens after `prompt` to the run's log and to TensorBoard (`sample`), on rank 0."""

    def __init__(self, prompt: str, tokens: int, seed: int):
        self.prompt, self.tokens, self.seed = prompt, tokens, seed

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Draw one sample. The seed is the same each time, so that samples differ only by the model."""
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        prompt = tokenizer.encode_ordinary(self.prompt)
        n_positions = pl_module.config.model.n_positions
        try:
            with pl_module.step.evaluation.forwards() as model:
                ids = generate(
                    model, prompt or [tokenizer.eot_token], self.tokens, pl_module.vocab_size, n_positions, self.seed,
                    stopped=signals.pending,
                )  # fmt: skip
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("no sample at step %d: out of memory", trainer.global_step)
            return
        if signals.pending():
            log.info("no sample at step %d: the run is stopping", trainer.global_step)
            return
        known = [i for i in ids if i < tokenizer.n_vocab]
        text = self.prompt + decode_after(tokenizer.decode, prompt, known)
        log.info("sample at step %d: %r", trainer.global_step, text)
        for logger in trainer.loggers:
            if log_text := getattr(logger, "log_text", None):  # train/tensorboard.py, train/services.py
                log_text("sample", text, trainer.global_step)

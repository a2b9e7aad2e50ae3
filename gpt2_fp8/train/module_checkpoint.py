"""What the LightningModule adds to a checkpoint, and how it is restored from one: in a run, and from a folder alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from gpt2_fp8.checkpoint import files
from gpt2_fp8.checkpoint.manifest import CheckpointError
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.runtime import rng
from gpt2_fp8.train import resume, saved_config

log = logging.getLogger(__name__)

_FOLDER = "GPT2Module.load_from_checkpoint(FOLDER), of a whole checkpoint: RUN/checkpoints/step-NNNNNNNN, or your own"


@dataclass
class Restored:
    """What a checkpoint holds for later: it cannot be restored at the moment the checkpoint is read.

    Attributes:
        random: the generators' states of every rank that was there. They wait until nothing else draws numbers before
            training.
        step: what the training step begins with, if there is no step yet.
    """

    random: list[Any] = field(default_factory=list)
    step: Mapping[str, Any] = field(default_factory=dict)

    def begin_training(self, seed: int, step: int) -> None:
        """Put this rank's random numbers where the checkpoint left them. From now on the step's own state is newer.

        `step`: how many of the run are done; `seed` and `step` are for a rank that the checkpoint does not know.
        """
        rng.begin_rank(self.random, seed, step)
        self.step, self.random = {}, []


def check_arguments(hparams_file: object, strict: bool | None) -> None:
    """Raise UserError if what Lightning's `load_from_checkpoint` takes besides would change something."""
    problems = []
    if hparams_file is not None:
        remedy = "leave it out, or give config=load_config(...)"
        problems.append(Problem("hparams_file: a checkpoint holds its configuration", remedy))
    if strict is False:
        problems.append(Problem("strict=False: a model with some of its weights is none", "leave strict out"))
    if problems:
        raise UserError(problems)


def read(
    path: Path, map_location: torch.device | str, config: RunConfig | None
) -> tuple[RunConfig, Mapping[str, Tensor], Mapping[str, Any]]:
    """Return a checkpoint's configuration, its weights and what its training step begins with.

    `config` is for a checkpoint that does not hold its own. Raises CheckpointError where they do not fit.
    """
    try:
        checkpoint = files.read(path, map_location, ("state_dict", "training_step", saved_config.KEY))
    except CheckpointError as error:  # its remedies are for a command line
        raise CheckpointError([Problem(problem.cause, _FOLDER) for problem in error.problems]) from None
    config = config or saved_config.from_checkpoint(checkpoint, path)
    saved_config.check_size(config, checkpoint["state_dict"], path)
    return config, checkpoint["state_dict"], checkpoint.get("training_step", {})


def add(checkpoint: dict[str, Any], step: TrainingStep) -> None:
    """Add every rank's random numbers, what a step begins with, and what the run computed in. Collective."""
    checkpoint["rng"] = rng.gather()
    checkpoint["model"] = asdict(step.config.model)
    checkpoint["optimizer"] = step.config.optimizer.name
    checkpoint["training_step"] = step.state_dict()
    plan = step.plan
    checkpoint["precision"] = {
        "asked": plan.asked, "ran": plan.ran, "recipe": plan.recipe, "reason": plan.reason, "fell_back": plan.fell_back,
    }  # fmt: skip


def take(checkpoint: dict[str, Any], trainer: pl.Trainer, step: TrainingStep) -> Restored:
    """Check a checkpoint that Lightning has read, and restore what can be restored now.

    The configuration, not the checkpoint, says the optimizer's settings: they are replaced in place. Raises UserError
    where the checkpoint is another model's, or of other text, with every difference.
    """
    config, own = step.config, checkpoint.get("training_step", {})
    others = list(resume.other_settings(config.model, checkpoint.get("model", {})))
    if trainer.state.fn != TrainerFn.FITTING:
        resume.refuse(others)
        step.load_state_dict(own)
        return Restored()
    path = Path(str(trainer.ckpt_path))
    resume.refuse_parts(path, checkpoint.keys())
    resume.refuse_longer(path, checkpoint["global_step"], config)
    resume.refuse_other_optimizer(path, checkpoint.get("optimizer"), config)
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # whose tokenizer gives the weights' shapes
    others += datamodule.other_settings(checkpoint["TokenDataModule"])
    others += resume.other_seed(config, checkpoint.get(saved_config.KEY))
    resume.refuse(list(dict.fromkeys(others)))  # the text's seed is the run's, unless it has its own
    step.load_state_dict(own)
    changes = (
        resume.keep_own_settings(path, checkpoint, step.model, config),
        resume.other_validation(checkpoint, step.plan.backend),
        resume.fp8_again(checkpoint["global_step"], step),
    )
    for told in changes if trainer.is_global_zero else ():
        if told is not None:
            log.warning("%s", told)
    return Restored(checkpoint["rng"])

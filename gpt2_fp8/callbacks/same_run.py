"""Each rank of a run computes the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gpt2_fp8.config.errors import Problem, SharedRefusal
from gpt2_fp8.runtime import collectives

# Names of places, which may be another one on each node. What is read there is compared.
_PLACES = (
    *("run_name", "ckpt_path", "init_from", "tags", "notes"),
    *("data.cache_dir", "data.train_files", "data.val_files", "data.path", "data.tokenizer", "data.sources"),
)
_SHOWN = 80  # characters of a value
_KINDS = ("settings", "versions", "kernels", "text")


class SameRun(Callback):
    """Compares once what this rank is about to train with what the others are.

    Ranks that differ would go on: gradients of other models of equal shapes can be averaged, or those of other text,
    and each kernel rounds in its own way.

    Args:
        settings: a whole configuration, as nested dictionaries.
        versions: of what could change a number.
        kernels: what computes, by the part of the model, in words.
    """

    def __init__(
        self, settings: Mapping[str, Any], versions: Mapping[str, str | None], kernels: Mapping[str, str]
    ) -> None:
        self._facts = {"settings": flatten(settings), "versions": dict(versions), "kernels": dict(kernels)}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Compare before anything is computed. Collective. Raises SharedRefusal, the same on all ranks."""
        identity = getattr(getattr(trainer, "datamodule", None), "identity", None)
        own = self._facts | {"text": identity() if identity is not None else {}}
        problems = differences([json.loads(words) for words in collectives.everyones(json.dumps(own, default=str))])
        if problems:
            raise SharedRefusal(problems)


def differences(ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[Problem]:
    """Return a problem for each kind of fact in which any rank differs from rank 0, with the first such rank."""
    problems = []
    for kind in _KINDS:
        rank = next((rank for rank, facts in enumerate(ranks) if facts[kind] != ranks[0][kind]), None)
        if rank is not None:
            own, first = ranks[rank][kind], ranks[0][kind]
            names = [name for name in {**first, **own} if own.get(name) != first.get(name)]
            said = "; ".join(f"{name} {_shown(own, name)} instead of {_shown(first, name)}" for name in names)
            problems.append(Problem(f"rank {rank} has other {kind} than rank 0: {said}"))
    return problems


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their whole keys, without the names of places."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        key = prefix + name
        if key in _PLACES:
            continue
        found |= flatten(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return found


def _shown(facts: Mapping[str, Any], name: str) -> str:
    value = str(facts.get(name, "none"))
    return value if len(value) <= _SHOWN else value[: _SHOWN - 3] + "..."

"""Runs that differ in nothing but the seed are repetitions of one condition; what else differs names the conditions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpt2_fp8.config.shown import line
from gpt2_fp8.reports.runs import Run

# What does not change what is trained: where it is written, what is logged, how the text is fetched.
_NO_CONDITION = ("seed", "data.seed", "run_name", "notes", "ckpt_path", "data.num_workers", "data.cache_dir")
_NO_CONDITION_BELOW = ("tags.", "logger.", "callbacks.")
_NOT_OF_TRAINING = ("trainer.log_every_n_steps", "trainer.val_check_interval", "trainer.profiler")
# Keys that name a condition if they can, before others.
_TELLING = ("precision.name", "recipe.name", "precision.backend", "model.name", "optimizer.name", "optim.lr")
# What a comparison of precisions may differ in, beside them: how the same numbers are computed.
_OF_PRECISION = (
    *("precision.", "recipe.", "compile", "cuda_graphs", "attention", "activation_checkpointing"),
    *("micro_batch_size", "trainer.accelerator", "trainer.deterministic"),
)
_LONGEST = 80  # characters of a name
RAN = "ran"


@dataclass(frozen=True)
class Condition:
    """Runs of the same settings, and the name that tells them from the others."""

    name: str
    settings: dict[str, Any]
    runs: tuple[Run, ...]

    @property
    def ran(self) -> str | None:
        """The precision that ran."""
        return self.runs[0].ran

    @property
    def fp8(self) -> bool:
        """Whether it has computed in FP8."""
        return self.runs[0].fp8

    @property
    def seeds(self) -> list[str]:
        """The seed of each run, without that of the text where the former alone tells the runs apart."""
        full, short = [run.seed for run in self.runs], [str(run.settings.get("seed")) for run in self.runs]
        return short if len(set(short)) == len(set(full)) else full

    def differs(self, other: Condition) -> list[str]:
        """Return the keys, beyond precision and how it is computed, whose values are not those of `other`."""
        keys = dict.fromkeys([*self.settings, *other.settings])
        return [
            key
            for key in keys
            if key != RAN
            and not key.startswith(_OF_PRECISION)
            and self.settings.get(key, _ABSENT) != other.settings.get(key, _ABSENT)
        ]


_ABSENT = object()


def of(runs: Sequence[Run]) -> list[Condition]:
    """Return the conditions of runs, in the order of their first runs; a condition's runs in the order of their seeds.

    A run that fell back to another precision is a condition of its own.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    settings = [_settings(run) for run in runs]
    keys = sorted({key for found in settings for key in found}, key=_rank)
    varied = [key for key in keys if len({repr(found.get(key, _ABSENT)) for found in settings}) > 1]
    for run, found in zip(runs, settings, strict=True):
        groups.setdefault(tuple(repr(found.get(key, _ABSENT)) for key in varied), []).append(run)
    members = [tuple(sorted(group, key=lambda run: (len(run.seed), run.seed))) for group in groups.values()]
    each = [_settings(group[0]) for group in members]
    return [Condition(*parts) for parts in zip(_names(each, varied), each, members, strict=True)]


def base_of(conditions: Sequence[Condition]) -> Condition:
    """Return what the others are compared with: bf16 if it ran, else any without FP8, else the first."""
    for rule in (lambda c: c.ran == "bf16", lambda c: c.ran is not None and not c.fp8):
        if found := [condition for condition in conditions if rule(condition)]:
            return found[0]
    return conditions[0]


def _settings(run: Run) -> dict[str, Any]:
    without_effect: tuple[str, ...] = _NO_CONDITION_BELOW
    if run.settings.get("precision.name", run.asked) in ("bf16", "fp32"):
        without_effect = (*_NO_CONDITION_BELOW, "recipe.")
    kept = {
        key: value
        for key, value in run.settings.items()
        if key not in (*_NO_CONDITION, *_NOT_OF_TRAINING) and not key.startswith(without_effect)
    }
    return kept | {"precision.name": run.settings.get("precision.name", run.asked), RAN: run.ran}


def _rank(key: str) -> tuple[int, str]:
    return (_TELLING.index(key) if key in _TELLING else len(_TELLING) + (key == RAN), key)


def _names(each: Sequence[dict[str, Any]], varied: Sequence[str]) -> list[str]:
    """Return names of as few keys as tell the conditions apart, in the order of `varied`."""
    chosen: list[str] = []
    for key in varied:
        if _distinct(each, [*chosen, key]) > _distinct(each, chosen):
            chosen.append(key)
    names = [line(" ".join(_words(found, chosen)), _LONGEST) for found in each]
    return [name if names.count(name) == 1 else f"{name} #{names[: place + 1].count(name)}"
            for place, name in enumerate(names)]  # fmt: skip


def _distinct(each: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
    return len({tuple(repr(found.get(key, _ABSENT)) for key in keys) for found in each})


def _words(found: dict[str, Any], keys: Sequence[str]) -> Iterator[str]:
    """Yield the words of a name. A precision goes without its key; it says so if another one ran."""
    asked, ran = found.get("precision.name"), found.get(RAN)
    if "precision.name" in keys or not set(keys) - {RAN}:
        yield str(asked)
    for key in keys:
        if key not in ("precision.name", RAN) and key in found:
            yield f"{key.removesuffix('.name')}={found[key]}"
    if ran != asked:
        yield f"(ran {ran})"

"""The keys of a configuration by their dotted names: which there are, what each may be, and which one was meant.

A number's range is written into its type: `Annotated[int, Range(1)]`. `parsing.build` checks it with the type.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from gpt2_fp8.config.errors import Problem

_COUNTED_MOST = 10**12  # nothing here is counted beyond; below, what torch and the logs count in does not overflow


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`. With `open_*`, the bound itself is left out."""

    least: float
    most: float = math.inf
    open_least: bool = False
    open_most: bool = False

    def why_not(self, value: float) -> str | None:
        """Return what is wrong with `value`; None if it is in range."""
        low = value <= self.least if self.open_least else value < self.least
        high = value >= self.most if self.open_most else value > self.most
        if low or high:
            return f"must be {self}"
        if isinstance(value, float) and value and not 1e-38 <= abs(value) <= 1e38:
            return "is beyond what float32 can hold"
        return f"is beyond {_COUNTED_MOST:,}" if isinstance(value, int) and value > _COUNTED_MOST else None

    def __str__(self) -> str:
        least = f"{'above' if self.open_least else 'at least'} {self.least}"
        if self.most == math.inf:
            return least
        if not self.open_least and not self.open_most:
            return f"from {self.least} to {self.most}"
        return f"{least} and {'below' if self.open_most else 'at most'} {self.most}"


Count = Annotated[int, Range(1)]
Steps = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Part = Annotated[float, Range(0, 1, open_most=True)]
Positive = Annotated[float, Range(0, open_least=True)]
Share = Annotated[float, Range(0, 1, open_least=True)]
Amount = Annotated[float, Range(0)]
# With an upper end that nobody has: a run would use all memory or disk before it could report that.
Workers = Annotated[int, Range(0, 1024)]
Scored = Annotated[int, Range(0, 10**7)]
Tokens = Annotated[int, Range(0, 10**6)]
Sequences = Annotated[int, Range(1, 10**6)]

hints_of = cache(partial(get_type_hints, include_extras=True))


class Kind(NamedTuple):
    """What a key may be."""

    members: tuple[tuple[Any, Range | None], ...]  # of a union, or the type itself: each with the range it declares
    classes: tuple[Any, ...]  # the dataclasses among them
    values: Any  # of a group whose keys are the user's own, the type of its values; else None


@cache
def kind_of(hint: Any) -> Kind:
    """Return what a type says of its key."""
    inner, _ = _split_annotated(hint)
    members: list[tuple[Any, Range | None]] = []
    for member in get_args(inner) if get_origin(inner) in (Union, UnionType) else (hint,):
        bare, notes = _split_annotated(member)
        if get_origin(bare) is list:
            item, of_items = _split_annotated(get_args(bare)[0])
            bare, notes = list[item], (*notes, *of_items)  # type: ignore[valid-type]
        ranges = [note for note in notes if isinstance(note, Range)]
        members.append((bare, ranges[0] if ranges else None))
    own = [get_args(member)[1] for member, _ in members if get_origin(member) is dict]
    return Kind(tuple(members), tuple(m for m, _ in members if is_dataclass(m)), own[0] if own else None)


def _split_annotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def meanings(cls: type) -> dict[str, str]:
    """Return the meaning of each key of `cls` that says one."""
    texts = {name: [m for m in _split_annotated(hint)[1] if isinstance(m, str)] for name, hint in hints_of(cls).items()}
    return {name: found[0] for name, found in texts.items() if found}


@cache
def tag_field(classes: tuple[Any, ...]) -> str:
    """Find the field whose Literal tells the classes of a union apart."""
    shared = [name for name in hints_of(classes[0]) if all(tags_of(c, name) for c in classes)]
    choices = {name: [tag for c in classes for tag in tags_of(c, name)] for name in shared}
    tagging = [name for name, found in choices.items() if len(set(found)) == len(found)]
    assert len(tagging) == 1, f"one field must tell {classes} apart"
    return tagging[0]


@cache
def tags_of(cls: Any, field: str) -> tuple[str, ...]:
    """List the choices that a class stands for."""
    hint = hints_of(cls).get(field)
    return get_args(hint) if get_origin(hint) is Literal else ()


@cache
def key_paths(cls: Any) -> dict[str, tuple[str, ...]]:
    """Return every key of `cls` and below as a path, with the tags of the union's members that have it."""
    paths: dict[str, tuple[str, ...]] = {}
    for name, hint in hints_of(cls).items():
        classes = kind_of(hint).classes
        if not classes:
            paths[name] = ()
        for member in classes:
            tags = tags_of(member, tag_field(classes)) if len(classes) > 1 else ()
            for below, own in key_paths(member).items():
                key = f"{name}.{below}"
                paths[key] = (*paths.get(key, ()), *(tags or own))
    return paths


def is_text(cls: type, key: str) -> bool:
    """Return whether a dotted key of `cls` is text or a list of texts, in a member of each union on its way."""
    name, _, below = key.partition(".")
    kind = kind_of(hints_of(cls).get(name))
    if kind.values is not None and kind_of(kind.values).classes:  # after a name of the user's own
        kind, below = kind_of(kind.values), below.partition(".")[2]
    if below:
        return any(is_text(member, below) for member in kind.classes)
    return any(member in (str, list[str]) for member, _ in kind.members)


def choices_of(cls: type, key: str) -> list[str]:
    """Return the words that a dotted key of `cls` is chosen from, in a member of each union on its way; or none."""
    name, _, below = key.partition(".")
    kind = kind_of(hints_of(cls).get(name))
    if below:
        return [choice for member in kind.classes for choice in choices_of(member, below)]
    literals = [str(value) for member, _ in kind.members if get_origin(member) is Literal for value in get_args(member)]
    return [*literals, *(["true", "false"] if bool in dict(kind.members) else [])]


def value_of(config: object, key: str) -> object:
    """Return the value of a dotted key; None if this configuration's classes do not have it."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part, None)
    return config


def problem(of: object, keys: str, reason: str, remedy: str = "", prefix: str = "") -> Problem:
    """Return a problem whose cause begins with the values of `keys`, words of `of` that `prefix` makes whole."""
    names = keys.split()
    values = ", ".join(f"{prefix}{name}={show(value_of(of, name))}" for name in names)
    return Problem(f"{values}: {reason}", remedy, tuple(f"{prefix}{name}" for name in names))


def show(value: object) -> str:
    """Return a value as it would be typed on the command line, cut to what fits a line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to write out the longest
        return f"a number of {value.bit_length()} bits"
    text = str(value)
    if isinstance(value, str) and (not value or value != value.strip() or not value.isprintable()):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---- names that do not exist -----------------------------------------------------------------------------------------

# Names that other programs have for keys of ours.
ALIASES = {
    "block_size": "model.n_positions", "seq_len": "model.n_positions", "max_seq_len": "model.n_positions",
    "context_length": "model.n_positions", "hidden_size": "model.n_embd", "d_model": "model.n_embd",
    "num_layers": "model.n_layer", "num_hidden_layers": "model.n_layer", "num_heads": "model.n_head",
    "num_attention_heads": "model.n_head", "num_key_value_heads": "model.n_kv_head",
    "intermediate_size": "model.mlp_width", "rope_theta": "model.rope_base", "dropout": "model.dropout",
    "tie_word_embeddings": "model.tied_head", "batch_size": "micro_batch_size",
    "per_device_train_batch_size": "micro_batch_size", "total_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "global_batch_size", "accumulate_grad_batches": "global_batch_size",
    "learning_rate": "optim.lr", "max_lr": "optim.lr", "min_lr": "optim.min_lr_ratio", "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2", "wd": "optim.weight_decay", "lr_scheduler": "optim.schedule",
    "warmup_iters": "optim.warmup_steps", "gradient_clip_val": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm", "max_iters": "trainer.max_steps", "num_iterations": "trainer.max_steps",
    "num_epochs": "trainer.max_epochs or trainer.max_tokens", "num_train_epochs": "trainer.max_epochs",
    "eval_interval": "trainer.val_check_interval", "save_interval": "callbacks.checkpoint_every_n_steps",
    "log_interval": "trainer.log_every_n_steps", "resume": "ckpt_path", "resume_from_checkpoint": "ckpt_path",
    "torch_compile": "compile", "gradient_checkpointing": "activation_checkpointing",
    "num_gpus": "trainer.devices", "world_size": "trainer.devices", "dtype": "precision=bf16, fp32 or fp8_hybrid",
    "use_fp8": "precision=fp8_hybrid", "fp8_recipe": "recipe=delayed, current or block",
    "wandb_project": "'logger=[default,wandb]' logger.wandb.project=NAME",
    "wandb": "logger.wandb, with 'logger=[default,wandb]'", "device": "trainer.accelerator",
    "muon_lr": "optimizer.matrix_lr", "eval_iters": "data.val_sequences", "eval_steps": "trainer.val_check_interval",
    "epochs": "trainer.max_epochs", "steps": "trainer.max_steps",
    "save_steps": "callbacks.checkpoint_every_n_steps", "save_total_limit": "callbacks.keep_checkpoints",
    "logging_steps": "trainer.log_every_n_steps", "lr_decay_iters": "trainer.max_steps",
    "lr_scheduler_type": "optim.schedule", "adam_epsilon": "optim.eps", "max_seq_length": "model.n_positions",
    "tie_embeddings": "model.tied_head", "bf16": "precision=bf16", "report_to": "logger", "out_dir": "run_name",
    "output_dir": "run_name", "model_name": "model", "dataset": "data", "train_data_path": "data.train_files",
    "initial_checkpoint_dir": "init_from", "ema": "optim.ema_decay", "patience": "callbacks.early_stopping_patience",
    "early_stopping": "callbacks.early_stopping_patience", "max_new_tokens": "tokens",
    "num_return_sequences": "samples",
}  # fmt: skip


def near_names(name: str, names: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return up to `n` of `names` that look like `name`, or the one that differs in upper and lower case alone."""
    lower = {other.lower(): other for other in names}
    if name.lower() in lower:
        return [lower[name.lower()]]
    return [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=n, cutoff=cutoff)]


def either(words: Sequence[str]) -> str:
    """Join words: `a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def key_named(name: str, schema: type) -> str | None:
    """Return the key of a schema that a name without its group most likely means; None if none is similar."""
    leaves = {path.rpartition(".")[2]: path for path in reversed(key_paths(schema))}
    named = leaves | {path: path for path in leaves.values()}
    return ALIASES.get(name) or next((named[found] for found in near_names(name, named, 1)), None)


def unknown_key(path: str, own: Sequence[str], everywhere: Iterable[str]) -> tuple[str, str]:
    """Return cause and remedy for a key that is not among the names `own` of its place, nor the paths `everywhere`."""
    group, _, leaf = path.rpartition(".")
    paths = list(everywhere)
    cause = f"there is no key {path}"
    if (alias := ALIASES.get(leaf)) and path not in paths:
        return cause, f"here it is {alias}"
    matches = [other for other in paths if other.rpartition(".")[2] == leaf]
    matches = matches or [f"{group}.{name}" if group else name for name in near_names(leaf, own, cutoff=0.75)]
    if not matches:
        groups = [other.partition(".")[0] for other in paths]
        named = {other.rpartition(".")[2]: other for other in paths} | {name: name for name in (*paths, *groups)}
        matches = [named[name] for name in near_names(leaf, named, 2, 0.7)]
    if matches:
        return cause, f"did you mean {either(list(dict.fromkeys(matches))[:3])}?"
    return cause, f"{group} has the keys {', '.join(own)}" if group else ""


def unknown_choice(key: str, value: str, choices: Sequence[str]) -> tuple[str, str]:
    """Return cause and remedy for a choice that does not exist."""
    matches = near_names(value.removesuffix(".yaml"), choices, 1)
    matches = matches or [c for c in choices if value and (c.startswith(value) or value.startswith(c))]
    have = f"the choices are {', '.join(choices)}"
    meant = f"did you mean {key}={either(matches)}? ({have})" if matches else have
    return f"{key}={value}: there is no such choice", meant

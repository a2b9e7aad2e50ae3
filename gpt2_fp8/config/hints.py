"""What to say to someone who typed a name that does not exist: other programs' names first, then similar ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from gpt2_fp8.config import foreign_keys, other_words, typed

# Groups of keys that only a choice brings: what to choose.
UNCHOSEN = {"logger.wandb": "logger=[default,wandb]", "logger.mlflow": "logger=[default,mlflow]"}
REFUSED = {("precision", "fp8_e5m2")}  # choices that exist to say why they are refused, and are never advised

TWO_SOURCES = "+data@data.sources.web=fineweb +data@data.sources.links=openwebtext"  # they have one tokenizer

# Values that need more than a list of what is allowed.
VALUES = {
    "trainer.devices": "a number of GPUs or auto; which ones is CUDA_VISIBLE_DEVICES=0,1 in front of the command",
    "compile": "compile=true, false or auto",
    "compile_mode": "compile_mode=default or reduce-overhead",
    "cuda_graphs": "cuda_graphs=true, false or auto",
    "micro_batch_size": "a number of sequences that fits the GPU's memory: micro_batch_size=8",
    "precision.keep_bf16": "'precision.keep_bf16=[head,last]'",
    "data.weights": "'data.weights={web: 7, own: 3}' by the sources' names, or data.weights=null for equal ones",
    "bench.model": "'bench.model=[gpt2,gpt2_medium]'",
    "bench.precision": "'bench.precision=[bf16,fp8_hybrid]'",
    "bench.recipe": "'bench.recipe=[delayed,current]'",
    "bench.micro_batch_size": "'bench.micro_batch_size=[4,64]'",
}

# Where a class of data is told by its kind, the choices that have it; tests hold this against conf/data.
KINDS = {
    "stdlib": ("stdlib",),
    "files": ("text_files",),
    "token_files": ("token_files",),
    "hub": ("fineweb", "openwebtext", "slimpajama"),
    "file_or_hub": ("tinyshakespeare",),
    "registered": ("registered",),
    "mixture": ("mixture",),
}
OPTIMIZERS = ("adamw", "adamw_bf16", "muon")  # tests hold this against conf/optimizer
DEFAULTS = {"precision": "fp8_hybrid"}  # what is advised of several that have a key; otherwise the first of them


def unchosen(path: str, value: object = None) -> str | None:
    """Return the words that bring a group of keys, where `value` was typed in its place; None: it is no such group."""
    choices = [choice for kind, names in KINDS.items() if kind != "mixture" for choice in names]
    if path == "data.sources":
        typed = [name for name in value if name in choices] if isinstance(value, list | dict) else []
        words = [f"+data@data.sources.{name}={name}" for name in typed]
        return " ".join(words) if len(words) > 1 else TWO_SOURCES
    if path.startswith("data.sources."):
        choice = value if value in choices else "fineweb"
        return f"+data@{path}={choice}, and so for every source" if path.count(".") == 2 else None
    return UNCHOSEN.get(path)


def near(name: str, names: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return up to `n` of `names` that look like `name`, the most similar first.

    If one differs only in upper and lower case, it is returned alone.
    """
    lower = {other.lower(): other for other in names}
    if name.lower() in lower:
        return [lower[name.lower()]]
    return [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=n, cutoff=cutoff)]


def near_list(path: str, value: object, names: Sequence[str]) -> str | None:
    """Return what to type for a list of `names`, each once, with others in it; None if it is not known of all."""
    meant = [near(str(item), names, 1) for item in (value if isinstance(value, list) else [value])]
    items = dict.fromkeys(found[0] for found in meant if found)
    return f"did you mean {path}='[{','.join(items)}]'?" if meant and all(meant) else None


def either(words: Sequence[str]) -> str:
    """Join words: `a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def unknown_key(
    path: str,
    own: Sequence[str],
    everywhere: Iterable[str],
    owners: Sequence[str],
    tag: object,
    value: object = None,
) -> tuple[str, str]:
    """Return cause and remedy for a key that does not exist where it was put.

    Args:
        own: the names that do exist there.
        everywhere: all keys there are, as paths.
        owners: the choices of the same group that do have it.
        tag: the choice that was made.
        value: what was typed for it.
    """
    if told := foreign_keys.advice(path, value):
        return told
    group, _, leaf = path.rpartition(".")
    if owners:
        group = f"data@{group}" if group.startswith("data.sources.") else group
        theirs = [name for owner in owners for name in KINDS.get(owner, (owner,)) if (group, name) not in REFUSED]
        ours = either([f"{group}={name}" for name in KINDS.get(str(tag), (str(tag),))])
        beside = f" {path}='[FILE]'" if leaf in ("train_files", "val_files") else ""
        return (
            f"{path} belongs to {group}={either(theirs)}, and this run has {ours}",
            f"choose {group}={min(theirs, key=lambda name: name != DEFAULTS.get(group))}{beside}, or leave {path} out",
        )
    paths = list(everywhere)
    matches = [p for p in paths if p.rpartition(".")[2] == leaf]
    matches = matches or [f"{group}.{name}" if group else name for name in near(leaf, own, cutoff=0.75)]
    if not matches:
        named = {p.rpartition(".")[2]: p for p in paths} | {p: p for p in paths} | {g: g for g in _groups(paths)}
        matches = [named[name] for name in [*near(path, named, 1, 0.7), *near(leaf, named, 2, 0.7)]]
    if matches:
        return f"there is no key {path}", f"did you mean {either(list(dict.fromkeys(matches))[:3])}?"
    where = f"{group} has the keys" if group else "there are"
    return f"there is no key {path}", f"{where} {', '.join(own)}"


def _groups(paths: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(path.partition(".")[0] for path in paths if "." in path), "experiment", "debug"]


def unknown_choice(key: str, value: str, choices: Sequence[str]) -> tuple[str, str]:
    """Return cause and remedy for a choice that does not exist."""
    cause = f"{key}={value}: there is no such choice"
    if (ours := other_words.choice(key, value)) in choices:
        return cause, f"{key}={ours}"
    if key == "data" and (files := as_files(value)):
        return f"{cause}, and files are listed", files
    choices = [choice for choice in choices if (key, choice) not in REFUSED]
    if known := other_words.words_of_choice(key, value):
        return f"{cause}: {known[0]}", known[1]
    matches = near(value.removesuffix(".yaml"), choices, 1)
    matches = matches or [c for c in choices if value and (c.startswith(value) or value.startswith(c))]
    have = f"the choices are {', '.join(choices)}"
    if not matches and key == "optim" and (wanted := near(value, OPTIMIZERS, 1)):  # whose names lie near each other
        return f"{cause}: optim has rates and batch sizes, by the model's size", f"optimizer={wanted[0]}"
    if key == "experiment":
        have += "; one of your own in FOLDER/experiment/NAME.yaml: -cd FOLDER experiment=NAME"
    return cause, f"did you mean {key}={either(matches)}? ({have})" if matches else have


def as_files(value: str) -> str | None:
    """Return the words that read the files that `data=value` was meant to name; None if it names none."""
    kind = {"bin": "token_files"}.get(value.rpartition(".")[2], "text_files")
    if value.rpartition("/")[2].startswith("_"):  # a file that choices of this program are built upon
        return None
    named = "/" in value or value.endswith((".txt", ".jsonl", ".zst", ".parquet", ".bin"))
    return f"data={kind} {typed.listed('data.train_files', [value])}" if named else None


def unknown_choice_of_group(group: str, groups: Sequence[str]) -> tuple[str, str]:
    """Return cause and remedy for a group that does not exist."""
    remedy = f"the groups are {', '.join(groups)}"
    if matches := near(group, groups):
        remedy = f"did you mean {matches[0]}? ({remedy})"
    return f"there is no group {group}", remedy

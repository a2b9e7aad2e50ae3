"""The files of conf/ with what they are built upon, read without Hydra."""

from pathlib import Path

import yaml

from gpt2_fp8.compose import conf_dir


def leaves(node, path=""):
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key, value


def bases(file):
    """The files that a file is built upon, those of its defaults list that choose from no group, and under which key
    their own keys come (none: beside the file's)."""
    if file.parent.name == "model":  # config.yaml has it in front of every model
        yield Path("_model.yaml"), ""
    defaults = yaml.safe_load((conf_dir() / file).read_text()).get("defaults", [])
    for entry in defaults:
        if isinstance(entry, str) and entry != "_self_":
            name, _, key = entry.partition("@")
            path = Path(f"{name[1:]}.yaml") if name.startswith("/") else file.parent / f"{name}.yaml"
            yield path, f"{key}." if key else ""


def inherited(file):
    return {f"{prefix}{key}": value for base, prefix in bases(file) for key, value in merged(base).items()}


def own(file):
    content = yaml.safe_load((conf_dir() / file).read_text())
    content.pop("defaults", None)
    content.pop("hydra", None)
    return dict(leaves(content))


def merged(file):
    """The keys and values that a file sets, with those of its bases."""
    return inherited(file) | own(file)

"""The files of conf/ with what they are built upon, read without Hydra."""

from pathlib import Path

import yaml

from gpt2_fp8.compose import conf_dir


def leaves(node, path=""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key, value


def bases(file):
    """The files that a file is built upon: those of its defaults list that choose from no group."""
    defaults = yaml.safe_load((conf_dir() / file).read_text()).get("defaults", [])
    names = [entry for entry in defaults if isinstance(entry, str) and entry != "_self_"]
    return [Path(f"{name[1:]}.yaml" if name.startswith("/") else file.parent / f"{name}.yaml") for name in names]


def own(file):
    """The keys and values that a file sets by itself."""
    content = yaml.safe_load((conf_dir() / file).read_text())
    content.pop("defaults", None)
    content.pop("hydra", None)
    return dict(leaves(content))


def merged(file):
    """The same with those of its bases."""
    return {key: value for base in bases(file) for key, value in merged(base).items()} | own(file)

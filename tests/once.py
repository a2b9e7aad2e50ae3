"""What a process of the suite does once: composing the same files, and collecting what lives for good."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import re
import sys
from io import StringIO
from pathlib import Path
from typing import IO

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from gpt2_fp8.compose import commandline, composition, conf_dir

MODULES = 20  # objects are counted as old once more when so many modules were imported
_PATH = [("hydra", "pkg://hydra.conf"), ("main", str(conf_dir())), ("schema", "structured://")]  # no user's folder
_GROUP = re.compile(rf"~|\+*({'|'.join(path.name for path in conf_dir().iterdir() if path.is_dir())})[=@/]")
original_load = OmegaConf.load


class OldObjects:
    """Leaves the objects of imported modules out of later collections: they live as long as the process."""

    def __init__(self) -> None:
        self._modules = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Look for new modules before a test. On a GPU nothing is left out: what a run keeps there is measured."""
        if item.get_closest_marker("gpu"):
            return
        if len(sys.modules) >= self._modules + MODULES:
            gc.collect()  # what is garbage now would stay
            gc.freeze()
            self._modules = len(sys.modules)


def pytest_configure(config: pytest.Config) -> None:
    """Begin with both, in this process alone: a process that a test starts is as a user's."""
    config.pluginmanager.register(OldObjects())
    composition.compose = compose  # type: ignore[assignment]
    OmegaConf.load = load  # type: ignore[method-assign]


def compose(config_name: str, words: list[str], return_hydra_config: bool = False) -> DictConfig:
    """Compose as `hydra.compose`, and remember what choices among the project's own files come to."""
    path = GlobalHydra.instance().config_loader().get_search_path().get_path()
    apart = any(word.lstrip("+~").startswith("hydra") or "$" in word for word in words)
    if apart or not return_hydra_config or [(entry.provider, entry.path) for entry in path] != _PATH:
        return hydra.compose(config_name, words, return_hydra_config=return_hydra_config)
    choices = tuple(word for word in words if _GROUP.match(word))
    cfg: DictConfig = pickle.loads(remembered(config_name, choices))
    overrides = [commandline.parse_override(word) for word in words]
    values = [override for override in overrides if override.input_line not in choices]
    ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    OmegaConf.clear_cache(cfg)  # the time of `${now:...}`
    cfg.hydra.runtime.cwd = os.getcwd()  # all else that Hydra takes from the process
    cfg.hydra.overrides.task = words
    cfg.hydra.job.override_dirname = get_overrides_dirname(overrides, **cfg.hydra.job.config.override_dirname)
    return cfg


@functools.lru_cache(512)
def remembered(config_name: str, words: tuple[str, ...]) -> bytes:
    """Return a pickle of what `hydra.compose` returns: a copy from it takes a sixth of a deep copy's time."""
    return pickle.dumps(hydra.compose(config_name, list(words), return_hydra_config=True))


def load(file: str | Path | IO[str]) -> DictConfig | ListConfig:
    text = file.read() if hasattr(file, "read") else Path(file).read_text(encoding="utf-8")
    cfg: DictConfig | ListConfig = pickle.loads(parsed(text))
    return cfg


@functools.lru_cache(512)
def parsed(text: str) -> bytes:
    return pickle.dumps(original_load(StringIO(text)))

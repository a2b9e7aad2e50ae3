"""What the processes of the suite do once: composing the same choices, and collecting what lives for good."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import os
import pickle
import re
import shutil
import sys
import tempfile
from io import StringIO
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.utils import JobRuntime
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from gpt2_fp8.compose import commandline, conf_dir

if TYPE_CHECKING:
    import pytest

MODULES = 20  # objects are counted as old once more when so many modules were imported
_PATH = [("hydra", "pkg://hydra.conf"), ("main", str(conf_dir())), ("schema", "structured://")]  # no user's folder
_GROUP = re.compile(rf"~|\+*({'|'.join(path.name for path in conf_dir().iterdir() if path.is_dir())})[=@/]")
_APART = re.compile(r"[~+]*hydra\.(searchpath|job\.(config|env))")
if "COMPOSED_ONCE" not in os.environ:  # of pytest's processes the first
    os.environ["COMPOSED_ONCE"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["COMPOSED_ONCE"], ignore_errors=True)
_SHARED = Path(os.environ["COMPOSED_ONCE"])  # where they leave to each other what is composed
original_load = OmegaConf.load
original_compose = ConfigLoaderImpl._load_configuration_impl


class OldObjects:
    """Leaves the objects of imported modules out of later collections: they live as long as the process."""

    def __init__(self) -> None:
        self._modules = 0

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Look for new modules before a test. On a GPU nothing is left out: what a run keeps there is measured."""
        if item.get_closest_marker("gpu"):
            return
        if len(sys.modules) >= self._modules + MODULES:
            gc.collect()  # what is garbage now would stay
            gc.freeze()
            self._modules = len(sys.modules)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OldObjects())
    remember()


def remember() -> None:
    """Have Hydra compose the same choices once in this process, and in those that are forked from it afterwards."""
    ConfigLoaderImpl._load_configuration_impl = compose  # type: ignore[method-assign]
    OmegaConf.load = load  # type: ignore[method-assign]
    importlib.metadata.version = functools.cache(importlib.metadata.version)  # what is installed stays the same
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


def compose(
    loader: ConfigLoaderImpl, config_name: str, overrides: list[str], run_mode: RunMode, from_shell: bool = True,
    validate_sweep_overrides: bool = True,
) -> DictConfig:  # fmt: skip
    """Compose as Hydra's loader does, and remember what choices among the project's own files come to."""
    choices = tuple(word for word in overrides if _GROUP.match(word))
    path = [(entry.provider, entry.path.removeprefix("file://")) for entry in loader.get_search_path().get_path()]
    if path != _PATH or any(_APART.match(word) for word in overrides) or any("$" in word for word in choices):
        return original_compose(loader, config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
    typed = [commandline.parse_override(word) for word in overrides]
    if validate_sweep_overrides:
        loader.validate_sweep_overrides_legal(typed, run_mode, from_shell)
    cfg: DictConfig = pickle.loads(remembered(loader, config_name, choices))
    OmegaConf.clear_cache(cfg)  # the time of `${now:...}`
    cfg.hydra.runtime.cwd = os.getcwd()  # all else that Hydra takes from the process
    cfg.hydra.job.name = JobRuntime.instance().get("name")
    values = [word for word in typed if word.input_line not in choices and not word.is_sweep_override()]
    loader._apply_overrides_to_config(values, cfg)
    own = [word for word in typed if not word.is_hydra_override()]
    cfg.hydra.overrides.hydra = [word.input_line for word in typed if word.is_hydra_override()]
    cfg.hydra.overrides.task = [word.input_line for word in own]
    cfg.hydra.job.override_dirname = get_overrides_dirname(own, **cfg.hydra.job.config.override_dirname)
    return cfg


def remembered(loader: ConfigLoaderImpl, config_name: str, choices: tuple[str, ...]) -> bytes:
    """Return a pickle of what is composed: a copy from it takes a sixth of a deep copy's time."""
    shared = _SHARED / hashlib.sha256(repr((config_name, choices)).encode()).hexdigest()
    if shared.exists():
        return shared.read_bytes()
    cfg = original_compose(loader, config_name, list(choices), RunMode.RUN, validate_sweep_overrides=False)
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=_SHARED) as file:
        file.write(pickle.dumps(cfg))
        file.flush()
        os.link(file.name, shared)
    return pickle.dumps(cfg)


def load(file: str | Path | IO[str]) -> DictConfig | ListConfig:
    text = file.read() if hasattr(file, "read") else Path(file).read_text(encoding="utf-8")
    cfg: DictConfig | ListConfig = pickle.loads(parsed(text))
    return cfg


@functools.lru_cache(512)
def parsed(text: str) -> bytes:
    return pickle.dumps(original_load(StringIO(text)))

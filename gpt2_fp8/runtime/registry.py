"""A user's own callbacks, loggers, sources of text, optimizers and FP8 recipes, by name. Imports no torch.

A module that `plugins=[my_module]` names registers them when it is imported; the configuration then selects them:

    from gpt2_fp8.runtime import registry

    @registry.callback("my_callback")
    class MyCallback(lightning.pytorch.Callback):
        def __init__(self, config): ...
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.keys import unknown_choice

log = logging.getLogger(__name__)

Factory = Callable[..., Any]
_F = TypeVar("_F", bound=Factory)
_KEYS = "callbacks.extra", "logger.extra", "data.source", "optimizer.factory", "recipe.factory"
_known: dict[str, dict[str, Factory]] = {key: {} for key in _KEYS}
_folders: list[str] = []  # searched for modules, in addition to Python's own path


def callback(name: str) -> Callable[[_F], _F]:
    """Register a function or class that makes a Lightning Callback from a RunConfig, for `callbacks.extra=[NAME]`."""
    return _register("callbacks.extra", name)


def logger(name: str) -> Callable[[_F], _F]:
    """Register what makes a Lightning Logger from a RunConfig and the run's folder, for `logger.extra=[NAME]`."""
    return _register("logger.extra", name)


def data_source(name: str) -> Callable[[_F], _F]:
    """Register what makes a `data.units.Source` from the data group, for `data=registered data.source=NAME`."""
    return _register("data.source", name)


def optimizer(name: str) -> Callable[[_F], _F]:
    """Register what makes a `torch.optim.Optimizer`, for `optimizer=registered optimizer.factory=NAME`.

    It is called with two parameter groups, of matrices and of everything else, and with the `optim` group. A fused
    optimizer of torch's skips a step that is not finite on the device; for any other the host waits to know.
    """
    return _register("optimizer.factory", name)


def recipe(name: str) -> Callable[[_F], _F]:
    """Register what makes a Transformer Engine `Recipe` from the `precision` group, without a state between steps.

    For `recipe=registered recipe.factory=NAME`.
    """
    return _register("recipe.factory", name)


def load(modules: Sequence[str], folder: Path) -> None:
    """Import modules by name, from Python's path and from `folder`. Raises UserError, with a traceback in the log."""
    if modules and str(folder) not in _folders:
        sys.path.append(str(folder))
        _folders.append(str(folder))
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            log.exception("plugins: %s", module)
            raise UserError.of(
                f"plugins: {module} cannot be imported: {type(error).__name__}: {error}",
                "correct the module, or leave it out of plugins",
            ) from error


def folders() -> list[str]:
    """List the folders that a child process needs on its path to import the same modules."""
    return list(_folders)


def make(key: str, name: str, kind: type, *arguments: object) -> Any:
    """Make the object, a `kind`, that is registered under `name` for `key`. Raises UserError if there is none."""
    known = _known[key]
    if name not in known:
        cause, remedy = unknown_choice(key, name, sorted(known))
        here = remedy if known else "plugins=[MODULE], of the module that registers it"
        raise UserError.of(f"{cause}: no plugin has registered it", here)
    made = known[name](*arguments)
    if not isinstance(made, kind):
        raise UserError.of(
            f"{key}={name}: what is registered makes a {type(made).__name__}",
            f"return a {kind.__module__}.{kind.__qualname__}",
        )
    return made


def _register(key: str, name: str) -> Callable[[_F], _F]:
    def register(factory: _F) -> _F:
        before = _known[key].setdefault(name, factory)
        if (before.__module__, before.__qualname__) != (factory.__module__, factory.__qualname__):
            raise ValueError(f"{key}: {name} is registered by {before.__module__} already")
        _known[key][name] = factory
        return factory

    return register

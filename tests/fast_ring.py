"""The fast ring, `pytest -m fast`: the tests of `PLACES`, none of which may start a process or train a run."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

HERE = Path(__file__).resolve().parent
PLACES = {
    "checkpoint", "config", "data", "doctor", "engine", "fp8", "kernels", "layers", "model", "reports",
    "runtime", "test_layering.py", "test_written_programs.py",
}  # fmt: skip
SECONDS = 60  # of one test, on a machine that has other work


@pytest.hookimpl(tryfirst=True)  # before pytest looks at `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        place = item.path.relative_to(HERE).parts[0]
        apart = any(item.get_closest_marker(name) for name in ("whole", "slow"))
        if place in PLACES and not apart:
            item.add_marker("fast")
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with alone() if item.get_closest_marker("fast") else contextlib.nullcontext():
        return (yield)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Fail whatever starts a process or trains a run meanwhile."""

    def refused(*_: Any, **__: Any) -> Any:
        pytest.fail("a fast test starts no process and trains no run: mark it `whole`")

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (subprocess.Popen, "__init__"),
            (os, "fork"),
            (multiprocessing.process.BaseProcess, "start"),
        ):
            stack.enter_context(mock.patch.object(owner, name, refused))
        if "torch" in sys.modules:  # without it there is no training
            from lightning.pytorch import Trainer

            stack.enter_context(mock.patch.object(Trainer, "fit", refused))
        yield

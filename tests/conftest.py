"""A hub on this machine and a client of it, for the tests of its data and of its faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # imported where they are used: most tests need no hub
    from tests.data.hub import Hub
    from tests.data.hub_runs import Client


pytest_plugins = ["tests.fast_ring", "tests.once"]

# What is ignored at the start of a run stays ignored, and a shell has its background jobs ignore signals: tests and the
# processes that they start begin as from a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(_number, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Run a worker more than there are cores: a fifth of the time tests wait, for ranks, hubs and signals."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.fixture(scope="session")
def hub() -> Iterator[Hub]:
    from tests.data.hub import Hub
    from tests.data.hub_runs import repos

    with Hub(repos()) as served:
        yield served


@pytest.fixture(scope="session")
def client(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    from tests.data.hub_runs import Client

    opened = Client(hub, tmp_path_factory.mktemp("hf"))
    yield opened
    opened.close()

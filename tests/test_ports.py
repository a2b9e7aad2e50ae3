"""The ports that tests choose before they use them."""

import random
import socket

from tests import ports


def test_nobody_else_is_given_a_chosen_port():
    """The system gives one of its own range to whoever binds to port 0, or connects."""
    given = set()
    for _ in range(50):
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            given.add(any_port.getsockname()[1])
    apart = set(ports.apart())
    assert ports.free_port() in apart
    assert not given & apart or len(apart) == (1 << 16) - 10_000


def test_a_seed_does_not_have_two_processes_choose_the_same():
    chosen = set()
    for _ in range(20):
        random.seed(0)
        chosen.add(ports.free_port())
    assert len(chosen) > 1


def test_a_port_that_is_taken_is_not_chosen(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free = ports.free_port()
        choices = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(ports, "_choice", lambda _: next(choices))
        assert ports.free_port() == free

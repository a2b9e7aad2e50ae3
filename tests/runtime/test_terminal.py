"""Which terminals a bar is drawn on, and what is written past one."""

import io
import os

import pytest

from gpt2_fp8.runtime import process_end, terminal


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


CASES = [
    (True, {"TERM": "xterm-256color"}, True),
    (True, {"TERM": "linux", "NO_COLOR": ""}, True),
    (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
    (True, {"TERM": "dumb"}, False),
    (True, {}, False),
    (False, {"TERM": "xterm"}, False),
]


@pytest.mark.parametrize(("is_terminal", "environment", "drawn"), CASES)
def test_where_a_bar_is_drawn(is_terminal, environment, drawn):
    assert terminal.redraws(Stream(is_terminal), environment) is drawn


def test_a_closed_stream_is_no_terminal(tmp_path):
    closed = (tmp_path / "x").open("w")
    closed.close()
    assert not terminal.redraws(closed, {"TERM": "xterm"})


@pytest.mark.parametrize(("redrawn", "is_terminal"), [(True, True), (True, False), (False, True)])
def test_a_message_takes_the_place_of_the_bar(redrawn, is_terminal, monkeypatch):
    written = []
    monkeypatch.setattr(terminal, "redrawn", redrawn)
    monkeypatch.setattr(os, "isatty", lambda number: is_terminal and number == 2)
    monkeypatch.setattr(os, "write", lambda number, text: written.append((number, text)))
    process_end.say("\nSIGINT: stopping\n")
    assert written == [(2, b"\r\x1b[2KSIGINT: stopping\n" if redrawn and is_terminal else b"\nSIGINT: stopping\n")]

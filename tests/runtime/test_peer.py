"""A process of the same run is ended, and never another one that has its number."""

import json
import os
import signal
import subprocess
import sys

import pytest

from gpt2_fp8.runtime import peer


def test_this_process_has_a_name_that_stays():
    assert peer.own() == peer.own()
    assert peer.own().number == os.getpid()


@pytest.mark.parametrize("other", [{"began": "1"}, {"place": "another host"}, {"number": 2**22 + 1}])
def test_a_stranger_is_left_alone(other, monkeypatch):
    monkeypatch.setattr(peer.os, "kill", lambda *_: pytest.fail("killed"))
    assert not peer.kill(peer.own()._replace(**other))


@pytest.mark.whole
def test_a_frozen_process_is_ended():
    words = "import json; from gpt2_fp8.runtime import peer; print(json.dumps(peer.own()), flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        named = peer.Peer(*json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGSTOP)
        assert peer.kill(named)
        assert process.wait(30) == -signal.SIGKILL
        assert not peer.kill(named)
    finally:
        process.kill()
        process.communicate()

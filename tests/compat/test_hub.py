"""What `compat.hub` and `compat.tiktoken` expect."""

import hashlib
import inspect
from pathlib import Path

import pytest

from gpt2_fp8.compat import hub
from gpt2_fp8.compat import tiktoken as kept
from gpt2_fp8.data import hub as hub_data


def test_the_hubs_default_client_is_one_that_can_be_bounded():
    client = hub.default_client()
    try:
        assert client.follow_redirects
        assert client.event_hooks["request"], "it names requests, and refuses them offline"
        assert isinstance(client.event_hooks["response"], list)
        client.timeout = 3.0
        assert client.timeout.read == 3.0
    finally:
        client.close()


def test_the_factory_is_asked_for_each_client():
    import huggingface_hub

    before = hub.default_client
    made = []
    hub_data.bound_waits.cache_clear()
    hub_data.bound_waits()
    try:
        for _ in range(2):
            huggingface_hub.close_session()  # as the hub's client does after a connection has broken
            made.append(huggingface_hub.get_session())
        assert made[0] is not made[1]
        assert all(client.timeout.read == hub_data.TIMEOUT_SECONDS for client in made)
    finally:
        huggingface_hub.set_client_factory(before)
        huggingface_hub.close_session()
        hub_data.bound_waits.cache_clear()


def test_tiktoken_reads_the_files_that_are_known():
    from tiktoken_ext import openai_public

    source = inspect.getsource(openai_public.gpt2)
    for url, sha256 in kept._CONTENT.items():
        assert url in source
        assert sha256 in source


@pytest.mark.parametrize("variables", [["TIKTOKEN_CACHE_DIR"], []], ids=str)
def test_tiktoken_keeps_them_where_they_are_looked_for(variables, tmp_path, monkeypatch):
    from tiktoken import load

    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, str(tmp_path / "vocabulary"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # what `gettempdir` gives
    content = {url: f"the content of {url}".encode() for url in kept._CONTENT}
    monkeypatch.setattr(load, "read_file", content.__getitem__)
    digests = {url: hashlib.sha256(text).hexdigest() for url, text in content.items()}
    monkeypatch.setattr(kept, "_CONTENT", digests)
    assert not kept.has_gpt2()
    for url, sha256 in digests.items():
        load.read_file_cached(url, sha256)
    assert kept.has_gpt2()
    folder = kept.cache_dir()
    assert Path(tmp_path) in folder.parents
    assert {path.name for path in folder.iterdir()} == set(kept.GPT2_FILES)
    next(folder.iterdir()).write_bytes(b"cut short")
    assert not kept.has_gpt2()

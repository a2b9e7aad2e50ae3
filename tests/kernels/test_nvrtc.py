"""What happens where `cuda-core` is missing, broken, or cannot keep what it compiles, with stand-ins for it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gpt2_fp8.kernels import nvrtc


class Program:
    """Compiles anything, unless there is a cache that cannot be written."""

    failing: tuple[type[Exception], ...] = ()

    def __init__(self, source, kind, options):
        self.source, self.options = source, options

    def compile(self, target, cache=None):
        for error in self.failing:
            raise error("no libnvrtc.so.13\nand more")
        if cache == "unwritable":
            raise PermissionError("the cache")
        return SimpleNamespace(get_kernel=lambda name: (name, self.source, self.options))


@pytest.fixture(autouse=True)
def _ask_again():
    nvrtc.why_missing.cache_clear()
    yield
    nvrtc.why_missing.cache_clear()


@pytest.fixture
def install(monkeypatch):
    """Install a package `cuda` with these parts, and a GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def put(cache="cache", failing=(), without=()):
        monkeypatch.setattr(Program, "failing", failing)
        for name in ("cuda", "cuda.core", "cuda.core.utils"):
            monkeypatch.setitem(sys.modules, name, None if name in without else ModuleType(name))
        if not without:
            sys.modules["cuda.core"].Program = Program
            sys.modules["cuda.core"].ProgramOptions = dict
            sys.modules["cuda.core.utils"].FileStreamProgramCache = lambda: cache

    return put


BINDINGS = ModuleNotFoundError("No module named 'cuda.bindings'", name="cuda.bindings")


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ({}, None),
        ({"cache": "unwritable"}, None),
        ({"without": ("cuda.core",)}, "cuda-core is not installed"),
        ({"failing": (RuntimeError,)}, "cuda-core does not work here: RuntimeError: no libnvrtc.so.13"),
        ({"failing": (lambda _: BINDINGS,)}, "cuda-core does not work here: No module named 'cuda.bindings'"),
    ],
)
def test_what_is_missing(install, there, reason):
    install(**there)
    assert nvrtc.why_missing() == reason


def test_what_passes_by_is_no_reason(install):
    """A first failure, of a cache that another rank has locked, say, would have this process compute by other kernels
    to its end."""
    install()
    errors, compiled = [RuntimeError("database is locked")], Program.compile

    def compile(self, target, cache=None):
        if errors:
            raise errors.pop()
        return compiled(self, target, cache)

    Program.compile = compile
    try:
        assert nvrtc.why_missing() is None
    finally:
        Program.compile = compiled


def test_a_program_is_its_whole_text():
    """The cache on disk would not notice a change of a file that is only named."""
    text = nvrtc._source("layer_norm_forward.cu")
    assert "#include" not in text
    assert "over_block(" in text

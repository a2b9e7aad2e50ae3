"""What several modules of this folder share."""

import pytest

from gpt2_fp8.config import backend_support
from gpt2_fp8.fp8 import resolve
from gpt2_fp8.fp8.backends import Torchao
from tests.runs import train


@pytest.fixture
def emulating_torchao(monkeypatch):
    """A CPU that is taken for a GPU with FP8 units; torchao's products are computed from FP8's numbers."""
    monkeypatch.setattr(Torchao, "emulate", True)
    monkeypatch.setattr(Torchao, "why_not", classmethod(lambda cls, config: backend_support.why_not_torchao(config)))
    monkeypatch.setattr(resolve, "why_not_recipe", lambda name: None)
    monkeypatch.setattr(resolve, "_why_not_fp8", lambda config, device: None)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run of a single process, whose micro-batch two processes can take."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train(folder, "micro_batch_size=2")
    return folder

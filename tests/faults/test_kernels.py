"""Faults 127 and 129: kernels that are there and do not work; ids that a vocabulary has not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import reader
from gpt2_fp8.fp8.fused import Fused
from gpt2_fp8.fp8.resolve import Plan
from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.layers import attention, sdpa
from gpt2_fp8.train.setup import announce
from tests.data.corpora import files_config, module, write_jsonl

BROKEN = "cuda-core does not work here: RuntimeError: no libnvrtc.so.13"
LOST = "flash-attn-4 does not load: OSError: libcute.so"


@pytest.fixture
def layers(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The log's record of `layers`, for what is missing, on a GPU that is none."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(sdpa, "kernels", lambda *_: "torch's cuDNN kernel")  # which it asks the GPU

    def say(kernels: str | None, flash: str | None, *words: str) -> logging.LogRecord:
        monkeypatch.setattr(nvrtc, "missing", lambda: kernels)
        monkeypatch.setattr(attention, "why_no_flash", lambda: flash)
        caplog.clear()
        (config,) = preflight(["micro_batch_size=16", *words])
        with caplog.at_level(logging.INFO):
            plan = Plan("cuda", "fp8_hybrid", "fp8_hybrid", None, Fused(config, "fp8_hybrid", "cuda"))
            announce(config, plan, 50257, 1, tmp_path, None)
        return next(record for record in caplog.records if record.getMessage().startswith("layers"))

    return say


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["model=gpt2"],
            "gelu inside its GEMMs; logits never in memory; normalisation in CUDA C++, over rows; casts in",
        ),
        (["model=gpt2_large"], "(1,280 channels leave too little shared memory)"),
        (["model=gpt2_wide"], "(rows are wider than 2,048)"),
    ],
)
def test_127_the_log_says_which_kernels_run_and_why_not_others(layers: Any, words: list[str], expected: str) -> None:
    record = layers(None, None, *words, "global_batch_size=48")
    assert expected in record.getMessage()
    assert record.levelno == logging.INFO


@pytest.mark.parametrize(("kernels", "flash", "behind"), [(None, LOST, LOST), (BROKEN, LOST, f"{BROKEN}, {LOST}")])
def test_127_what_is_there_and_does_not_work_is_a_warning(
    layers: Any, kernels: str | None, flash: str | None, behind: str
) -> None:
    record = layers(kernels, flash, "model=gpt2")
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(f"slower than it could be: {behind}")
    assert ("casts in Triton" in record.getMessage()) == (kernels is not None)


class Strange:
    """A tokenizer that gives an id which it has not."""

    name, eot_token, n_vocab = "strange", 256, 257

    def encode_to_numpy(self, text: str, disallowed_special: Any) -> Any:
        return np.array([65, 60000, 66], dtype=np.uint32)


def test_129_an_id_that_the_tokenizer_has_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["some words of a document"] * 40)
    monkeypatch.setattr(reader, "load_tokenizer", lambda name: Strange())
    with pytest.raises(UserError, match=r"a\.jsonl.* the id 60000 of a vocabulary of 257\n +fix: "):
        module(files_config(path))

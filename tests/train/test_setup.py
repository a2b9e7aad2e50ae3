"""What a run says of itself before it starts: the precision and the layers that will compute it."""

import logging
from dataclasses import replace

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config import own_words
from gpt2_fp8.fp8.fused import Fused
from gpt2_fp8.fp8.plain import Reference
from gpt2_fp8.fp8.resolve import Plan
from gpt2_fp8.fp8.transformer_engine import TransformerEngine
from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.layers import sdpa
from gpt2_fp8.train.setup import announce, resolve_micro_batch

(CONFIG,) = compose.preflight(["model=gpt2"])


def plan(backend, ran, graphs=False, compiled=False):
    """A plan on a GPU."""
    made = backend(CONFIG, ran, "cuda")
    made.graphs, made.compiled = graphs, compiled
    return Plan("cuda", ran, ran, None, made)


FUSED = plan(Fused, "fp8_hybrid")
REFERENCE = plan(Reference, "bf16", compiled=True)


@pytest.fixture
def said(caplog, monkeypatch, tmp_path):
    """What is logged of a plan, by its label."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(sdpa, "kernels", lambda *_: "torch's cuDNN kernel")  # which it asks the GPU

    def say(plan):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            announce(CONFIG, plan, 50257, 1, tmp_path, None)
        return dict(message.split(maxsplit=1) for message in caplog.messages)

    return say


@pytest.mark.parametrize(
    ("of", "layers"),
    [
        (FUSED, "fused FP8 chain"),
        (plan(TransformerEngine, "fp8_hybrid"), "Transformer Engine"),
        (REFERENCE, "plain torch, compiled"),
        (plan(Reference, "bf16"), "plain torch"),
    ],
)
def test_layers(said, of, layers):
    line = said(of)["layers"]
    assert line.partition(";")[0] == layers


def test_graphs_and_attention_of_the_fused_layers(said):
    line = said(plan(Fused, "fp8_hybrid", graphs=True))["layers"]
    assert "CUDA graphs" in line
    assert "cuDNN" in line
    assert "CUDA graphs" not in said(FUSED)["layers"]


def test_the_fused_head_of_a_smaller_micro_batch_has_logits(monkeypatch):
    """As the line `layers` says once a micro-batch did not fit."""
    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    said = [FUSED.backend.kernels(50257, size)["logits"] for size in (16, 8)]
    assert said == ["never in memory", "with their statistics (fewer than 16,384 rows)"]


def test_precision(said):
    assert said(FUSED)["precision"] == "fp8_hybrid, recipe delayed, evaluation bf16"


def test_a_fallback_says_why(said):
    fallen = replace(REFERENCE, asked="fp8_hybrid", reason="the card is too old")
    assert said(fallen)["precision"] == "bf16 instead of fp8_hybrid: the card is too old"


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["model=tiny"], 16),
        (["model=gpt2", "data.tokenizer=bytes"], 1),
        (["model=gpt2", "data.tokenizer=bytes", "micro_batch_size=2"], 2),
        (["model=gpt2", "data.tokenizer=bytes", "micro_batch_size=auto"], 1),
    ],
)
def test_a_micro_batch_on_a_cpu_takes_seconds_unless_it_was_typed(words, size):
    (config,) = compose.preflight(["trainer=cpu", *words])
    assert resolve_micro_batch(config, 1, "cpu", own_words.keys(words)).micro_batch == size
    (gpu,) = compose.preflight(words)
    assert resolve_micro_batch(gpu, 1, "cuda", own_words.keys(words)).micro_batch >= size

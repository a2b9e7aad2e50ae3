"""`precision=auto` on a GPU that can do FP8: what it measures, chooses and remembers."""

import dataclasses
import logging

import pytest

from gpt2_fp8.backends.resolve import resolve
from gpt2_fp8.measure import auto_cache, auto_candidates, auto_precision, worker
from tests.gpu.common import HOPPER, composed
from tests.runs import metrics, start_elsewhere, summary, train

pytestmark = pytest.mark.fp8

AUTO = ["precision=auto", "compile=false", "trainer.max_steps=50"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    start_elsewhere(tmp_path, monkeypatch)


def settle(*overrides):
    return auto_precision.decide(composed(*AUTO, *overrides), "cuda", 1, None, 0)


def in_this_process(monkeypatch):
    """Measure without a child, which takes ten seconds to start; returns the names of what was measured."""
    measured = []

    def here(case, timeout_s):
        measured.append(f"{case.config.precision.name} {case.config.recipe.name}")
        return worker.run(case)

    monkeypatch.setattr(auto_candidates, "measure", here)
    return measured


def test_it_measures_chooses_says_why_and_remembers(monkeypatch):
    monkeypatch.setattr(auto_candidates, "RECIPES", ("mxfp8", "current", "delayed"))  # Hopper has no mxfp8
    measured = in_this_process(monkeypatch)
    config, choice = settle()
    assert [name.split()[0] for name in measured] == ["bf16"] + ["fp8_hybrid"] * (len(measured) - 1)
    assert {"fp8_hybrid current", "fp8_hybrid delayed"} <= set(measured)
    assert len(choice.candidates) == len(measured)
    for verdict in choice.candidates:
        assert verdict.out is None, "its numbers are not bf16's"
        assert verdict.tokens_per_second > 0
        assert verdict.peak_memory_gb > 0
        assert 2 < verdict.loss < 6
    layers = {verdict.recipe: verdict.layers for verdict in choice.candidates}
    assert layers[None] == "reference"
    assert layers["current"] == "te"
    assert layers["delayed"] == ("fused" if HOPPER else "te")
    assert choice.precision in ("bf16", "fp8_hybrid")
    assert "tokens/s against" in choice.reason
    assert "measured on this machine on 20" in choice.reason
    assert config.precision.name == choice.precision
    resolve(config, "cuda")  # what was chosen can run
    assert auto_cache.place().is_file()

    measured.clear()
    again, same = settle("seed=7", "optim.lr=0.1")
    assert measured == []
    assert same == choice
    assert again.precision == config.precision
    settle("model.n_layer=1", "recipe=delayed")
    assert measured == ["bf16 delayed", "fp8_hybrid delayed"], "another shape is measured for itself"


def test_a_candidate_without_memory_is_out(monkeypatch):
    """bf16 as it is measured, and an FP8 that does not fit."""
    in_this_process(monkeypatch)
    here = auto_candidates.measure

    def full(case, timeout_s):
        result = here(case, timeout_s)
        return result if result.ran == "bf16" else dataclasses.replace(result, status="out of memory")

    monkeypatch.setattr(auto_candidates, "measure", full)
    config, choice = settle("recipe=delayed")
    assert config.precision.name == "bf16"
    assert "fp8_hybrid, recipe delayed is out: out of memory" in choice.reason


@pytest.mark.slow  # four children, compilation among them: more than a minute
def test_a_whole_run(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    base = [
        "trainer=gpu", "model.n_layer=2", "model.n_embd=128", "model.n_head=2", "model.n_positions=128",
        "global_batch_size=16", "micro_batch_size=8", "trainer.max_steps=12", "trainer.val_check_interval=5",
        "optim.warmup_steps=2", "data.val_sequences=16", "trainer.log_every_n_steps=1", "precision=auto",
        "callbacks.sample_tokens=0", "callbacks.progress_bar=false",
    ]  # fmt: skip
    train(tmp_path / "run", base=base)
    told = summary(tmp_path / "run")["precision"]
    assert told["asked"] == "auto"
    assert told["ran"] == told["choice"]["precision"]
    assert len(told["choice"]["candidates"]) == 4
    assert told["choice"]["candidates"][0]["out"] is None, "bf16's own figures"
    assert f"precision  {told['ran']}" in caplog.text
    losses = metrics(tmp_path / "run")["train_loss"]
    assert losses[12] < losses[1] - 0.1

"""Whole runs of a model with every option: precisions, compilation, two ranks, checkpoints, and text."""

import torch

from gpt2_fp8 import generate
from gpt2_fp8.checkpoint import files
from gpt2_fp8.train.module import GPT2Module
from tests.runs import SMALL, checkpoint, summary, train
from tests.train.test_resume import QWEN

BASE = [*SMALL, *QWEN, "precision=bf16"]


def test_text_compiles_and_the_checkpoint_computes_alone(tmp_path):
    train(tmp_path / "run", "callbacks.sample_tokens=4", "trainer.max_steps=4", "compile=true", base=BASE)
    module = GPT2Module.load_from_checkpoint(checkpoint(tmp_path / "run", 4))
    assert module.config.model.rope_scaling == 8
    assert module.model.head.weight is not module.model.tokens.weight
    assert torch.isfinite(module.model(torch.zeros(1, 32, dtype=torch.long))).all()
    assert summary(tmp_path / "run")["status"] == "completed"


def test_a_checkpoint_that_names_no_precision_has_what_it_ran_in(tmp_path):
    """As one of a run that had asked for `precision=auto`."""
    train(tmp_path / "run", "precision=fp32")
    state = files.read(checkpoint(tmp_path / "run", 12))
    auto = {"name": "auto", "keep_bf16": ["head"], "evaluation": "bf16", "tolerance": 0.02}
    for ran in ("fp8_hybrid", "bf16"):
        state["hyper_parameters"]["precision"], state["precision"]["ran"] = auto, ran
        files.write(tmp_path / "auto", state)
        module = GPT2Module.load_from_checkpoint(tmp_path / "auto")
        assert module.config.precision.name == ran
        assert getattr(module.config.precision, "keep_bf16", ["head"]) == ["head"]
    assert generate.main([f"ckpt_path={tmp_path / 'auto'}", "prompt=a", "tokens=1"]) == 0

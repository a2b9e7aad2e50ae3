"""Whole runs of a model with every option: precisions, compilation, two ranks, checkpoints, and text."""

import pytest
import torch

from gpt2_fp8 import compose, generate
from gpt2_fp8.checkpoint import files
from gpt2_fp8.checkpoint.manifest import CheckpointError
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.train.module import GPT2Module
from gpt2_fp8.train.trained import from_checkpoint, to_plain, with_defaults
from tests.runs import SMALL, checkpoint, forked, metrics, record_steps, summary, train, train_until

OPTIONS = [
    "model=qwen3_0_6b", "optim=tiny", "trainer.max_steps=12", "trainer.val_check_interval=5", "model.n_kv_head=1",
    "model.head_size=32", "model.mlp_width=48", "model.vocab_size=null", "model.rope_scaling=8",
    "model.rope_low_freq_factor=1", "model.rope_high_freq_factor=4", "model.rope_original_positions=8",
    "model.tied_head=false",
]  # fmt: skip
BASE = [*SMALL, *OPTIONS]


@pytest.mark.parametrize(
    "words",
    [
        ["precision=fp32"],
        ["precision=bf16"],
        ["precision=bf16", "compile=true"],
        ["precision=bf16", "model.dropout=0.1", "activation_checkpointing=mlp"],
        ["precision=fp8_hybrid", "precision.keep_bf16=[head]"],
    ],
    ids=" ".join,
)
def test_three_legs_give_what_one_gives(tmp_path, monkeypatch, words):
    whole = record_steps(monkeypatch)
    train(tmp_path / "whole", *words, base=BASE)
    once = list(whole)
    whole.clear()
    train_until(4, tmp_path / "legs", *words, base=BASE)
    train_until(8, tmp_path / "legs", "ckpt_path=last", *words, base=BASE)
    train(tmp_path / "legs", "ckpt_path=last", *words, base=BASE)
    assert whole == once
    assert len(once) == 12
    first, *_, last = (float.fromhex(loss) for _, _, loss in once)
    assert last < first - 0.1


@pytest.mark.whole
@pytest.mark.slow
def test_two_ranks_train_as_one_and_write_text(tmp_path):
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "micro_batch_size=2"]
    sampled = ["callbacks.sample_tokens=8"]
    done = forked(*BASE[1:], *two, *sampled, "run_name=two", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "sample at step 12: " in done.stderr + done.stdout
    train(tmp_path / "one", "micro_batch_size=2", base=BASE)
    one, both = (metrics(folder)["val_loss"] for folder in (tmp_path / "one", tmp_path / "outputs" / "two"))
    assert list(both) == list(one) == [5, 10, 12]
    assert both == pytest.approx(one, rel=1e-5)


def test_text_compiles_and_the_checkpoint_computes_alone(tmp_path):
    train(tmp_path / "run", "callbacks.sample_tokens=4", "precision=bf16", "compile=true", base=BASE)
    saved = checkpoint(tmp_path / "run", 12)
    module = GPT2Module.load_from_checkpoint(saved)
    assert module.config.model.rope_scaling == 8
    assert module.model.head.weight is not module.model.tokens.weight
    assert torch.isfinite(module.model(torch.zeros(1, 32, dtype=torch.long))).all()
    assert summary(tmp_path / "run")["status"] == "completed"


def test_a_run_is_continued_with_its_own_options_alone(tmp_path):
    train_until(4, tmp_path / "run", base=BASE)
    with pytest.raises(CheckpointError) as told:
        train(tmp_path / "run", "ckpt_path=last", "model.rope_base=10000", "model.norm_epsilon=1e-5", base=BASE)
    causes = [problem.cause for problem in told.value.problems]
    assert causes == [
        "the checkpoint is of another model: model.norm_epsilon is 1e-06 there, 1e-05 here",
        "the checkpoint is of another model: model.rope_base is 1000000.0 there, 10000.0 here",
    ]


def test_a_checkpoint_from_before_the_options_is_gpt2s(tmp_path):
    (config,) = compose.preflight([])
    later = [name for name in ModelConfig.__dataclass_fields__ if hasattr(ModelConfig, name)]
    assert len(later) == 15
    plain = to_plain(config)
    for name in later:
        del plain["model"][name]
    assert from_checkpoint({"hyper_parameters": plain}, tmp_path).model == config.model
    assert ModelConfig(**with_defaults(ModelConfig, plain["model"])) == config.model


@pytest.mark.parametrize("ran", ["fp8_hybrid", "bf16", "fp32"])
def test_a_checkpoint_that_names_no_precision_has_what_it_ran_in(tmp_path, ran):
    """As one of a run that had asked for `precision=auto`."""
    train(tmp_path / "run", "precision=fp32")
    state = files.read(checkpoint(tmp_path / "run", 12))
    auto = {"name": "auto", "keep_bf16": ["head"], "evaluation": "bf16", "tolerance": 0.02}
    state["hyper_parameters"]["precision"], state["precision"]["ran"] = auto, ran
    files.write(tmp_path / "auto", state)
    module = GPT2Module.load_from_checkpoint(tmp_path / "auto")
    assert module.config.precision.name == ran
    assert getattr(module.config.precision, "keep_bf16", ["head"]) == ["head"]
    assert generate.main([f"ckpt_path={tmp_path / 'auto'}", "prompt=a", "tokens=1"]) == 0

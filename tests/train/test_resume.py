"""Whole runs of every kind, stopped and continued: steps, logs and checkpoints are those of a run in one piece."""

import json
import random

import pytest

from tests.data.token_files_made import llm_c, nano, some_ids
from tests.runs import SMALL, assert_same_checkpoint, checkpoint, metrics, record_steps, summary, train, train_until

EMULATED = ["precision=fp8_hybrid", "precision.backend=emulated"]
TORCHAO = ["precision.backend=torchao", "precision.keep_bf16=[blocks.0.fc1,blocks.1.qkv]", "recipe=rowwise"]
PENALTIES = ["penalty.z_loss=1e-3", "penalty.logit_l2=0.01", "penalty.activation_l1=0.1"]
AVERAGE = ["optim.ema_decay=0.9", "optim.ema_start_step=2"]
TWO_BLOCKS = ["model.n_layer=2", "activation_checkpointing=full", "model.dropout=0.1"]
QWEN = [
    "model=qwen3_0_6b", "optim=tiny", "trainer.max_steps=12", "trainer.val_check_interval=5", "model.n_kv_head=1",
    "model.head_size=32", "model.mlp_width=48", "model.vocab_size=null", "model.rope_scaling=8",
    "model.rope_low_freq_factor=1", "model.rope_high_freq_factor=4", "model.rope_original_positions=8",
    "model.tied_head=false",
]  # fmt: skip
MIXTURE = [
    "data=mixture", "+data@data.sources.code=stdlib", "+data@data.sources.ids=token_files",
    "data.weights={code: 0.75, ids: 0.25}", "data.sources.ids.tokenizer=bytes",
    "data.sources.ids.train_files=[train.bin]", "data.sources.ids.val_files=[val.bin]",
    "data.sources.ids.num_workers=0", "data.sources.ids.val_sequences=4", "data.sources.code.val_sequences=8",
]  # fmt: skip
DOCUMENTS = ["data=text_files", "data.train_files=[text.jsonl]", "data.val_fraction=0.1", "data.tokenizer=bytes",
             "document_mask=true"]  # fmt: skip
SETS = ["data.validation.own.files=text.jsonl", "data.validation.ids.files=val.bin"]
CASES = {
    "two workers": ["data.num_workers=2", "micro_batch_size=1", "model.dropout=0.2", *AVERAGE, *SETS],
    "within documents": [*DOCUMENTS, *EMULATED, *PENALTIES],
    "emulated, a block in bf16": [*EMULATED, "precision.keep_bf16=[first]", *TWO_BLOCKS],
    "torchao": [*TORCHAO, *TWO_BLOCKS],
    "every option": [*QWEN, "precision=bf16", "model.dropout=0.1", "activation_checkpointing=mlp"],
    "a block of 2026": [
        "model=gpt2_modern",
        "model.tied_head=false",
        "optim=tiny",
        "trainer.max_steps=12",
        "trainer.val_check_interval=5",
        *EMULATED,
        "optimizer=muon",
        "optim.embedding_lr=1e-2",
        "optim.scalar_lr=5e-3",
    ],
    "compiled": [*QWEN, "precision=bf16", "compile=true"],
    "a mixture": MIXTURE,
}


@pytest.fixture(autouse=True)
def _text(tmp_path, monkeypatch):
    """Files of ids, and documents of a few words, so that every sequence holds some borders."""
    monkeypatch.chdir(tmp_path)
    llm_c(tmp_path / "train.bin", some_ids(3000))
    nano(tmp_path / "val.bin", some_ids(500, 1))
    drawn = random.Random(0)
    texts = [" ".join(drawn.choices(("one", "two", "three", "four"), k=drawn.randint(1, 5))) for _ in range(4000)]
    (tmp_path / "text.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))


@pytest.mark.parametrize("case", [pytest.param(n, marks=[pytest.mark.slow] * (n == "compiled")) for n in CASES])
def test_legs_equal_one_run_bit_for_bit(tmp_path, monkeypatch, request, case):
    if case == "torchao":
        request.getfixturevalue("emulating_torchao")
    base = [word for word in SMALL if case != "a mixture" or not word.startswith("data.")] + CASES[case]
    steps = record_steps(monkeypatch)
    train(tmp_path / "whole", base=base)
    whole, steps[:] = steps[:], []
    assert len(whole) == 12
    train_until(4, tmp_path / "legs", base=base)
    train_until(8, tmp_path / "legs", "ckpt_path=last", base=base)
    train(tmp_path / "legs", "ckpt_path=last", base=base)
    assert steps == whole
    assert_same_checkpoint(checkpoint(tmp_path / "whole", 12), checkpoint(tmp_path / "legs", 12))
    ours, theirs = metrics(tmp_path / "legs"), metrics(tmp_path / "whole")
    for column in {"train_loss", "val_loss", "penalty", "val_loss/ids", "val_loss/own"} & set(theirs):
        assert ours[column] == theirs[column], column


def test_validation_has_the_mask_and_a_checkpoint_may_go_on_without_it(tmp_path):
    words = [*SMALL, *DOCUMENTS]
    train_until(5, tmp_path / "masked", "optim.lr=1e-12", base=words)
    train(tmp_path / "whole", "optim.lr=1e-12", "document_mask=false", base=words)
    masked, whole = (metrics(tmp_path / name) for name in ("masked", "whole"))
    assert masked["val_loss"][5] != whole["val_loss"][5], "with the same weights, to twelve digits"
    assert masked["train_loss"][1] != whole["train_loss"][1]
    train(tmp_path / "masked", "ckpt_path=last", "document_mask=false", base=words)
    assert summary(tmp_path / "masked")["status"] == "completed"


def test_what_steps_compute_otherwise_than_before_is_said(tmp_path, caplog):
    """A typed word, and one that was left out. A run that goes on as it was says nothing."""
    base = [*SMALL, "precision=fp32", "optim.schedule=constant", "optim.min_lr_ratio=1"]
    train_until(3, tmp_path / "run", "model.dropout=0.1", base=base)

    def said(*words):
        caplog.clear()
        train_until(int(words[0]), tmp_path / "run", *words[1:], "ckpt_path=last", base=base)
        return [record.getMessage() for record in caplog.records if " before)" in record.getMessage()]

    assert said("5", "model.dropout=0.1") == []
    told = [
        "model.dropout=0.0 (0.1 before)",
        "penalty.z_loss=0.0001 (0.0 before)",
        "optim.weight_decay=0.2 (0.1 before)",
    ]
    assert said("7", "penalty.z_loss=1e-4", "optim.weight_decay=0.2") == [f"from step 6 on {', '.join(told)}"]

"""Whole runs with attention within documents: stopped and resumed, validated, continued without, and exported."""

import json
import random

import pytest

from gpt2_fp8.config.programs import GenerateConfig
from gpt2_fp8.train.generation import Generation
from gpt2_fp8.train.module import GPT2Module
from tests.data.token_files_made import llm_c, nano, some_ids
from tests.runs import SMALL, metrics, summary, train, train_until


@pytest.fixture
def words(tmp_path):
    """A run on documents of a few words, so that every sequence holds some borders."""
    drawn = random.Random(0)
    path = tmp_path / "text.jsonl"
    documents = [" ".join(drawn.choices(("one", "two", "three", "four"), k=drawn.randint(1, 5))) for _ in range(4000)]
    path.write_text("".join(f"{json.dumps({'text': document})}\n" for document in documents))
    text = ["data=text_files", f"data.train_files=[{path}]", "data.val_fraction=0.1", "data.tokenizer=bytes"]
    small = [word for word in SMALL if not word.startswith("data=")]
    return [*small, *text, "document_mask=true", "trainer.max_steps=12", "trainer.val_check_interval=5"]


def test_validation_has_the_mask_and_a_checkpoint_may_go_on_without_it(tmp_path, words):
    train_until(5, tmp_path / "masked", "optim.lr=1e-12", base=words)
    train(tmp_path / "whole", "optim.lr=1e-12", "document_mask=false", base=words)
    masked, whole = (metrics(tmp_path / name) for name in ("masked", "whole"))
    assert masked["val_loss"][5] != whole["val_loss"][5], "with the same weights, to twelve digits"
    assert masked["train_loss"][1] != whole["train_loss"][1]
    train(tmp_path / "masked", "ckpt_path=last", "document_mask=false", base=words)
    assert summary(tmp_path / "masked")["status"] == "completed"


@pytest.mark.parametrize(("write", "begins"), [(nano, False), (llm_c, True)])
def test_the_rule_of_the_text_is_the_models_where_the_text_is_gone(tmp_path, write, begins):
    path = write(tmp_path / "text.bin", some_ids(4000))
    text = ["data=token_files", f"data.train_files=[{path}]", "data.tokenizer=bytes", "data.val_sequences=0"]
    small = [word for word in SMALL if not word.startswith("data")]
    train(tmp_path / "run", "document_mask=true", "trainer.max_steps=2", base=[*small, *text])
    path.unlink()
    module = GPT2Module.load_from_checkpoint(tmp_path / "run/checkpoints/step-00000002")
    for model in (module.model, Generation(GenerateConfig(ckpt_path=str(tmp_path / "run"))).model):
        assert (model.separator, model.separator_begins) == (256, begins)

"""Whole runs on a mixture of sources and on files of token ids, as a user types them."""

from pathlib import Path

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.programs import GenerateConfig
from gpt2_fp8.engine import red_flags
from gpt2_fp8.train.generation import Generation
from gpt2_fp8.train.module import GPT2Module
from gpt2_fp8.train.trained import from_checkpoint
from tests.data.corpora import write_jsonl
from tests.data.token_files_made import llm_c, nano, some_ids
from tests.runs import SMALL, checkpoint, metrics, read, summary, train
from tests.train.test_resume import MIXTURE

MIXED = [*(word for word in SMALL if not word.startswith("data.")), *MIXTURE]


@pytest.fixture(autouse=True)
def _corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    llm_c(tmp_path / "train.bin", some_ids(3000))
    nano(tmp_path / "val.bin", some_ids(500, 1))


def test_a_run_on_a_mixture_says_what_it_used_of_each_source(tmp_path: Path) -> None:
    train(tmp_path / "run", base=MIXED)
    data, logged = summary(tmp_path / "run")["data"], metrics(tmp_path / "run")
    assert {name: source["share"] for name, source in data["sources"].items()} == {"code": 0.75, "ids": 0.25}
    assert sum(source["tokens"] for source in data["sources"].values()) == 12 * 8 * 32
    assert data["sources"]["ids"]["tokens"] == pytest.approx(12 * 8 * 32 / 4, abs=3 * 32)
    assert logged["tokens/ids"][12] == data["sources"]["ids"]["tokens"]
    assert logged["epochs/ids"][12] == data["sources"]["ids"]["epochs"]
    for step, loss in logged["val_loss"].items():
        own = logged["val_loss/code"][step], logged["val_loss/ids"][step]
        assert own[0] != own[1]
        assert loss == pytest.approx((own[0] * 8 + own[1] * 4) / 12, rel=1e-6)
    with pytest.raises(UserError, match=r"data\.weights\.code was 3, and is now 1"):
        train(tmp_path / "run", "ckpt_path=last", "data.weights=null", "trainer.max_steps=20", base=MIXED)
    path = checkpoint(tmp_path / "run", 12)
    assert from_checkpoint(read(path), path).data == preflight(MIXED)[0].data


def test_waiting_for_data_names_the_sources_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(red_flags, "WAIT", -1.0)
    train(tmp_path / "run", base=MIXED)
    (said,) = (line for line in caplog.messages if "waiting for data" in line)
    words = [word.partition(" ")[0] for word in said.partition("; ")[2].split(", ")]
    preflight([*MIXED, "run_name=x", *words])
    assert words == ["data.sources.code.num_workers=2", "data.sources.ids.num_workers=2"]


def test_a_run_on_token_files_and_passes_over_them(tmp_path: Path) -> None:
    words = [*(word for word in SMALL if not word.startswith("trainer.max_steps")), "data=token_files",
             "data.tokenizer=bytes", "data.train_files=[train.bin]", "data.val_files=[val.bin]",
             "data.num_workers=0", "trainer.max_epochs=2", "trainer.max_steps=null"]  # fmt: skip
    train(tmp_path / "run", base=words)
    found = summary(tmp_path / "run")
    assert (found["steps"], found["data"]["source"]) == (-(-2 * 3000 // (8 * 32)), {"kind": "token_files", "files": 2})
    assert found["data"]["documents"]["read"] > 0
    write_jsonl(tmp_path / "text.jsonl", ["x"])
    with pytest.raises(UserError, match="unknown kind"):
        train(tmp_path / "other", "data.train_files=[text.jsonl]", "trainer.max_steps=2", base=words)


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

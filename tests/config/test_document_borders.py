"""Which document a separator belongs to, by the files of ids, and what has no single answer."""

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.data_schema import begin_with_separator
from gpt2_fp8.config.errors import UserError
from tests.data.token_files_made import LLAMA_3, llm_c, nano, some_ids


@pytest.fixture
def files(tmp_path):
    ids = some_ids(4000)
    made = {"nano": nano(tmp_path / "nano.bin", ids), "llm_c": llm_c(tmp_path / "llm_c.bin", ids)}
    made["wide"] = nano(tmp_path / "wide.bin", ids, "<u4")
    made["llama"] = llm_c(tmp_path / "llama.bin", ids, LLAMA_3)
    (tmp_path / "short.bin").write_bytes(b"12")
    return {**made, "short": tmp_path / "short.bin"}


def words(train, val=None, prefix="data"):
    kept = [f"{prefix}.val_files=[{val}]"] if val else [f"{prefix}.val_sequences=0"]
    return [f"{prefix}.train_files=[{train}]", f"{prefix}.tokenizer=bytes", *kept]


def config(*line):
    return preflight(["document_mask=true", *line])[0]


def problem(*line):
    with pytest.raises(UserError) as caught:
        config(*line)
    (found,) = caught.value.problems
    return found


@pytest.mark.parametrize(("name", "begins"), [("nano", False), ("wide", False), ("short", False), ("llm_c", True)])
def test_the_header_tells(files, name, begins):
    assert begin_with_separator(config("data=token_files", *words(files[name])).data) == begins


def test_files_of_two_kinds_are_refused_and_named(files):
    found = problem("data=token_files", *words(files["llm_c"], files["nano"]))
    assert f"begin with the separator in {files['llm_c']}, end with it in {files['nano']}" in found.cause
    assert preflight(["data=token_files", *words(files["llm_c"], files["nano"]), "document_mask=false"])
    assert config("data=token_files", *words(files["nano"], files["wide"]))


def test_a_mixture_of_text_and_files_that_begin_with_it_is_refused(files):
    mixed = ["data=mixture", "+data@data.sources.web=stdlib", "+data@data.sources.ids=token_files"]
    found = problem(*mixed, *words(files["llm_c"], prefix="data.sources.ids"))
    assert f"in {files['llm_c']}, end with it in source web" in found.cause
    assert config(*mixed, *words(files["nano"], prefix="data.sources.ids"))


def test_llama_3s_files_of_llm_c_are_refused(files):
    assert "documents begin with <|begin_of_text|>" in problem("data=token_files", *words(files["llama"])).cause
    assert preflight(["data=token_files", *words(files["llama"])])

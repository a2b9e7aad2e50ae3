"""`bench.rows`: a file of rows instead of combinations."""

from pathlib import Path

import pytest

from gpt2_fp8.compose.benchmark import preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.measure import table
from gpt2_fp8.measure.case import Case, Result
from gpt2_fp8.measure.table import Measured


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(text, *words, gpu=True):
    Path("rows.txt").write_text(text)
    return preflight(["bench.rows=rows.txt", *words], gpu)[1]


def problems(text, *words):
    with pytest.raises(UserError) as caught:
        rows(text, *words)
    return {problem.cause: problem.remedy for problem in caught.value.problems}


def test_each_row_is_a_run_of_its_own_words_and_no_baseline_is_added():
    text = "# what\n\nfirst: precision=bf16 compile=false attention=math\n"
    text += "small, FP8: precision=fp8_hybrid micro_batch_size=8 # x\n"
    first, second = rows(text, "bench.micro_batch_size=16", "model.n_positions=512")
    assert [c.notes for c in (first, second)] == ["first", "small, FP8"]
    assert (first.precision.name, first.compile, first.attention, first.micro_batch_size) == ("bf16", False, "math", 16)
    assert (second.precision.name, second.micro_batch_size, second.model.n_positions) == ("fp8_hybrid", 8, 512)
    assert first.global_batch_size * 512 == second.global_batch_size * 512 == 131_072, "the same step"


def test_a_rows_words_come_after_those_of_the_command_line():
    first, second = rows("a: precision=bf16\nb: precision=bf16 seed=3", "seed=2")
    assert (first.seed, second.seed) == (2, 3)


WRONG = {
    "no colon here": "line 1: it has no name before a colon",
    "a: seed=1\na: seed=2": "line 2: a row above has the name a",
    "a: 'seed=1": "line 1: its words cannot be read: No closing quotation",
    "": "bench.rows=rows.txt holds no row",
    "a: precision=fp99": "bench.rows, a: precision=fp99: there is no such choice",
    "a: seed=1,2": "bench.rows, a: seed=1,2 is several values",
    "a: run_name=x": "bench.rows, a: run_name=x: this changes nothing of what is measured",
    "a: trainer.max_steps=5": "bench.rows, a: trainer.max_steps=5: the benchmark has a key of its own",
    "a: trainer=ddp": "bench.rows, a: the benchmark measures one device",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_with_a_row_is_told_with_its_place(text):
    assert any(WRONG[text] in cause for cause in problems(text)), problems(text)


@pytest.mark.parametrize("word", ["bench.precision=bf16", "bench.baseline=true"])
def test_keys_that_rows_replace_are_refused(word):
    (cause,) = problems("a: seed=1", word)
    assert cause.startswith(f"{word.partition('=')[0]}: ")


def test_several_models_or_sizes_are_refused_with_rows():
    assert len(problems("a: seed=1", "bench.model=[gpt2,tiny]", "bench.micro_batch_size=[1,2]")) == 2


@pytest.mark.parametrize("name", ["missing.txt", "bytes.txt"])
def test_a_file_that_is_none(name):
    Path("bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"bench\.rows="):
        preflight([f"bench.rows={name}"], True)


def test_the_ratios_are_to_the_first_row_and_to_the_row_before():
    every = [
        Measured(Case(config=config, steps=2, warmup=1), Result(status="ok", ran="bf16", tokens_per_second=rate))
        for config, rate in zip(
            rows("a: precision=bf16\nb: precision=bf16\nc: precision=bf16"), (100.0, None, 250.0), strict=True
        )
    ]
    shown = table.case_rows(every)
    assert [(row["row"], row["x first"], row["x before"], row["x bf16"]) for row in shown] == [
        ("a", "1.000", "", ""), ("b", "", "", ""), ("c", "2.500", "", ""),
    ]  # fmt: skip
    assert table.case_rows([every[0], every[2]])[1]["x before"] == "2.500"

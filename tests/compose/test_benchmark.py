"""The benchmark's command line: which cases it comes to, and what it refuses before torch is imported."""

from dataclasses import fields
from pathlib import Path

import pytest

from gpt2_fp8.bench import Measured, case_rows
from gpt2_fp8.compose.benchmark import BenchConfig, defaults, preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.keys import meanings
from gpt2_fp8.measure.case import Case, Result


def cases(*argv, gpu=True):
    _, configs = preflight(list(argv), gpu)
    return [
        (c.model.name, c.micro_batch_size, c.precision.name, c.recipe.name if c.precision.name != "bf16" else None)
        for c in configs
    ]


def problems(*argv, gpu=True):
    with pytest.raises(UserError) as caught:
        preflight(list(argv), gpu)
    return {problem.cause: problem.remedy for problem in caught.value.problems}


@pytest.mark.parametrize("gpu", [True, False])
def test_the_file_the_schema_and_the_help_name_the_same_keys(gpu):
    assert set(defaults(gpu)) == {field.name for field in fields(BenchConfig)} == set(meanings(BenchConfig))


def test_without_a_word():
    assert cases() == [("gpt2", 64, "bf16", None), ("gpt2", 64, "fp8_hybrid", "delayed")]
    assert {model for model, *_ in cases(gpu=False)} == {"tiny"}
    assert cases("trainer=cpu") == cases(gpu=False)


def test_all_combinations_and_a_recipe_only_where_there_is_one():
    argv = "bench.precision=[bf16,fp8_hybrid]", "bench.recipe=[delayed,current]", "bench.micro_batch_size=[4,64]"
    assert cases(*argv) == [
        ("gpt2", size, *rest)
        for size in (4, 64)
        for rest in (("bf16", None), ("fp8_hybrid", "delayed"), ("fp8_hybrid", "current"))
    ]


def test_compiled_bf16_is_among_the_cases_of_a_gpu_unless_told_otherwise():
    assert cases("bench.precision=fp8_hybrid")[0] == ("gpt2", 64, "bf16", None)
    _, configs = preflight(["bench.precision=bf16", "compile=false"], True)
    assert [config.compile for config in configs] == [True, False]
    assert cases("bench.precision=fp8_hybrid", "bench.baseline=false") == [("gpt2", 64, "fp8_hybrid", "delayed")]
    assert cases("bench.precision=[fp8_hybrid]", gpu=False) == [
        ("tiny", size, "fp8_hybrid", "delayed") for size in (2, 8)
    ]


@pytest.mark.parametrize(
    ("words", "gpu", "whole"),
    [
        (["bench.micro_batch_size=64"], True, 128),
        (["bench.micro_batch_size=4"], True, 128),
        (["bench.micro_batch_size=256"], True, 256),
        (["bench.micro_batch_size=8", "model.n_positions=2048"], True, 64),
        (["bench.micro_batch_size=8"], False, 8),
        (["bench.micro_batch_size=8", "bench.global_batch_size=24"], True, 24),
    ],
)
def test_the_sequences_of_a_step(words, gpu, whole):
    _, configs = preflight(words, gpu)
    assert {config.global_batch_size for config in configs} == {whole}


def test_gpt2_keeps_its_vocabulary_on_any_text():
    sizes = {c.model.name: c.model.vocab_size for c in preflight(["bench.model=[gpt2,tiny]"], True)[1]}
    assert sizes == {"gpt2": 50257, "tiny": None}
    assert preflight(["model.vocab_size=60000"], True)[1][0].model.vocab_size == 60000


def test_a_runs_keys_hold_for_the_cases_that_have_them():
    argv = ["bench.recipe=[delayed,current]", "precision.keep_bf16=[head]", "recipe.margin=2", "optim.lr=1e-3"]
    bf16, delayed, current = preflight(argv, True)[1]
    assert {config.optim.lr for config in (bf16, delayed, current)} == {1e-3}
    assert delayed.precision.keep_bf16 == current.precision.keep_bf16 == ["head"]
    assert (delayed.recipe.margin, bf16.recipe.name) == (2, "auto")
    assert "precision.keep_bf16=[head]: no case of this benchmark has this key" in problems(
        "bench.precision=bf16", "precision.keep_bf16=[head]"
    )


REFUSED = (
    ("model=gpt2", "trainer.max_steps=8", "steps=3", "run_name=x", "precision.evaluation=bf16", "hydra.run.dir=x",
     "bench.modl=x", "bench.model=gpt3", "bench.steps=0", "bench.precision=[]", "bench.global_batch_size=100",
     "precision=fp32,bf16", "-m", "--steps=3"),
    ("bench.model=gpt2,tiny", "bench.precision=[fp8_e5m2]", "bench.micro_batch_size=null", "optim.lrr=1"),
    ("bench=null",),
)  # fmt: skip


def test_a_file_whose_run_is_counted_in_epochs_is_refused(tmp_path):
    file = tmp_path / "experiment/epochs.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\ntrainer:\n  max_steps: null\n  max_epochs: 2\n")
    told = problems("-cd", str(tmp_path), "experiment=epochs")
    assert told == {"the benchmark counts no epochs": "trainer.max_steps=NUMBER in the file"}


@pytest.mark.parametrize("words", REFUSED)
def test_all_that_is_refused_is_said_at_once(words):
    told = problems(*words)
    assert len(told) == len(words), told
    for word in words:
        assert any(word.partition("=")[0].rpartition(".")[2] in cause for cause in told), word


# ---- `bench.rows`: a file of rows instead of combinations ------------------------------------------------------------


def rows(text, *words, gpu=True):
    Path("rows.txt").write_text(text)
    return preflight(["bench.rows=rows.txt", *words], gpu)[1]


def row_problems(text, *words):
    Path("rows.txt").write_text(text)
    return problems("bench.rows=rows.txt", *words)


def test_each_row_is_a_run_of_its_own_words_and_no_baseline_is_added():
    text = "# what\n\nfirst: precision=bf16 compile=false attention=math\n"
    text += "small, FP8: precision=fp8_hybrid micro_batch_size=8 # x\n"
    text += "its own step: micro_batch_size=8 global_batch_size=24\n"
    first, second, third = rows(text, "bench.micro_batch_size=16", "model.n_positions=512")
    assert [c.notes for c in (first, second, third)] == ["first", "small, FP8", "its own step"]
    assert (first.precision.name, first.compile, first.attention, first.micro_batch_size) == ("bf16", False, "math", 16)
    assert (second.precision.name, second.micro_batch_size, second.model.n_positions) == ("fp8_hybrid", 8, 512)
    assert first.global_batch_size * 512 == second.global_batch_size * 512 == 131_072, "the same step"
    assert third.global_batch_size == 24


WRONG = {
    "no colon here": "line 1: it has no name before a colon",
    "a: seed=1\na: seed=2": "line 3: a row above has the name a",
    "b: 'seed=1": "line 4: No closing quotation",
    "c: precision=fp99": "bench.rows, c: precision=fp99: there is no such choice",
    "d: seed=1,2": "bench.rows, d: seed=1,2 is several values",
    "e: run_name=x": "bench.rows, e: run_name=x: this changes nothing of what is measured",
    "f: trainer.max_steps=5": "bench.rows, f: trainer.max_steps=5: the benchmark has a key of its own",
    "g: trainer=ddp": "bench.rows, g: the benchmark measures one device",
}


def test_what_is_wrong_with_a_row_is_told_with_its_place():
    told = row_problems("\n".join(WRONG))
    assert [reason for reason in WRONG.values() if not any(reason in cause for cause in told)] == []
    assert list(row_problems("")) == ["bench.rows=rows.txt has no line"]
    assert [cause[:15] for cause in row_problems("a: seed=1", "bench.precision=bf16")] == ["bench.precision"]


def test_the_ratios_are_to_the_first_row_and_to_the_row_before():
    every = [
        Measured(Case(config=config, steps=2, warmup=1), Result(status="ok", ran="bf16", tokens_per_second=rate))
        for config, rate in zip(
            rows("a: precision=bf16\nb: precision=bf16\nc: precision=bf16"), (100.0, None, 250.0), strict=True
        )
    ]
    shown = case_rows(every)
    assert [(row["row"], row["x first"], row["x before"], row["x bf16"]) for row in shown] == [
        ("a", "1.000", "", ""), ("b", "", "", ""), ("c", "2.500", "", ""),
    ]  # fmt: skip
    assert case_rows([every[0], every[2]])[1]["x before"] == "2.500"

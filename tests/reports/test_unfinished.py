"""Runs that have no summary.json, since they run still or were killed."""

import json
import logging
from dataclasses import asdict, replace

import pytest
import yaml

from gpt2_fp8 import compose
from gpt2_fp8.backends.reference import Reference
from gpt2_fp8.backends.resolve import Plan, resolve
from gpt2_fp8.reports import checklist, compare_conditions, comparison_notes, conditions, find_runs, verdict
from gpt2_fp8.reports.unfinished import STATUS
from gpt2_fp8.train.setup import announce
from tests.reports.made import TOKENS, rows, run

LOG = """[01:02:03] device     NVIDIA H200 x 1
[01:02:03] precision  fp8_hybrid, recipe delayed
[01:02:03] layers     fused; attention fa4
[01:02:03] steps      20 of 4 x 25 = 100 tokens, in micro-batches of 2 sequences
[01:02:04] sample at step 10: 'x'
"""


def settings(*words):
    (config,) = compose.preflight(["trainer.max_steps=20", "global_batch_size=4", "micro_batch_size=4", *words])
    return asdict(config)


def killed(folder, config, steps=8, log=LOG, **columns):
    """A run's folder after kill -9: its log, and what Hydra had written before it began."""
    run(folder, rows(lambda step: 3.0, steps, **columns), config)
    (folder / "summary.json").unlink()
    (folder / "run.log").write_text(log)
    (folder / ".hydra").mkdir()
    (folder / ".hydra/config.yaml").write_text(yaml.safe_dump(config | {"data": config["data"] | {"seed": "${seed}"}}))
    (folder / ".hydra/overrides.yaml").write_text("- seed=1\n")
    (folder / "checkpoints/step-00000005").mkdir(parents=True)
    return folder


def compared(folder):
    found = find_runs.below([folder], lambda *_: None)
    assert found.left_out == []
    each = conditions.of(found.runs)
    return compare_conditions.compare(each, conditions.base_of(each))


@pytest.fixture
def ended(tmp_path):
    """A bf16 run of 20 steps, to compare with."""
    return run(tmp_path / "bf16", rows(lambda step: 3.0, 20), settings("precision=bf16"))


def test_a_killed_run_is_compared_up_to_where_it_came(tmp_path, ended):
    killed(tmp_path / "fp8", settings("precision=fp8_hybrid"), skipped_steps=2, bf16_reruns=1)
    found = compared(tmp_path)
    (one,) = found.results[1].condition.runs
    assert (one.status, one.asked, one.ran, one.layers, one.device) == (
        *(STATUS, "fp8_hybrid", "fp8_hybrid", "fused", "NVIDIA H200"),
    )
    assert (one.steps, one.seed, one.saved, one.skipped_steps, one.reruns, one.samples) == (
        8,
        "1337",
        True,
        2,
        1,
        {10: "x"},
    )
    assert one.settings["micro_batch_size"] == 2, "as the run's log says"
    assert (found.tokens, found.results[1].train.difference.value) == (8 * TOKENS, 0.0)
    assert "fp8: it runs, or was killed" in " ".join(comparison_notes.of(found, []))
    (judged,) = verdict.judge(found)
    answers = {line.item: line for line in judged.lines}
    assert answers["A test run in FP8 completes"].answer == checklist.UNKNOWN
    assert answers["Loss curves similar to bf16's"].answer == checklist.UNKNOWN
    assert answers["No NaN losses or instability"].figure == "2 steps skipped, 1 steps run again in bf16"


def test_it_belongs_to_the_runs_of_its_settings_and_does_not_shorten_what_has_ended(tmp_path, ended):
    """A warm-up that the run has fitted to its length makes no other condition of it, and neither does its seed."""
    config = settings("precision=fp8_hybrid", "micro_batch_size=2", "optim.warmup_steps=2")
    run(tmp_path / "whole", rows(lambda step: 3.0, 20), config)
    unfitted = config | {"optim": config["optim"] | {"warmup_steps": 2000}, "seed": 2}
    killed(tmp_path / "killed", unfitted)
    found = compared(tmp_path)
    assert [len(result.condition.runs) for result in found.results] == [1, 2]
    assert found.tokens == 20 * TOKENS
    assert "1 of 2 runs are not in the losses (running or killed)" in " ".join(comparison_notes.of(found, []))


@pytest.mark.parametrize("size", [1, 2, 1024])
def test_the_micro_batch_that_a_run_announces_does_not_split_a_condition(size, tmp_path, ended, caplog):
    words = ["precision=fp32", "global_batch_size=2048"]
    (config,) = compose.preflight([*words, f"micro_batch_size={size}"])
    run(tmp_path / "whole", rows(lambda step: 3.0, 20), settings(*words, f"micro_batch_size={size}"))
    plan = Plan("cpu", "fp32", "fp32", None, Reference(config, "fp32", "cpu"))
    with caplog.at_level(logging.INFO):
        announce(config, plan, 50257, 1, tmp_path, None)
    said = "".join(f"[01:02:03] {line}\n" for line in caplog.messages)
    killed(tmp_path / "killed", settings(*words, "micro_batch_size=auto", "seed=2"), log=said)
    assert [len(result.condition.runs) for result in compared(tmp_path).results] == [1, 2]


@pytest.mark.parametrize("reason", [None, "FP8 is faster here"])
@pytest.mark.parametrize("evaluation", ["fp8", "bf16"])
def test_what_a_run_announces_of_its_precision_is_read_again(evaluation, reason, tmp_path, ended, caplog):
    words = ["precision=fp8_hybrid", "precision.backend=emulated", f"precision.evaluation={evaluation}"]
    (config,) = compose.preflight(["trainer=cpu", *words])
    plan = replace(resolve(config, "cpu"), reason=reason)
    with caplog.at_level(logging.INFO):
        announce(config, plan, 257, 1, tmp_path, None)
    killed(tmp_path / "fp8", settings(*words), log="".join(f"[01:02:03] {line}\n" for line in caplog.messages))
    (one,) = compared(tmp_path).results[1].condition.runs
    assert (one.asked, one.ran, one.reason, one.fp8) == ("fp8_hybrid", "fp8_hybrid", reason, True)


def test_a_job_that_still_runs_does_not_shorten_a_sweep(tmp_path, ended):
    run(tmp_path / "fp32", rows(lambda step: 3.0, 20), settings("precision=fp32"))
    killed(tmp_path / "fp8", settings("precision=fp8_hybrid"))
    found = compared(tmp_path)
    assert found.tokens == 20 * TOKENS
    assert "to see its losses so far" in " ".join(comparison_notes.of(found, []))


def test_a_fall_back_is_known_from_the_log(tmp_path, ended):
    line = "[01:02:03] precision  fp32 instead of fp8_hybrid: this torch was built without CUDA\n"
    killed(tmp_path / "fp8", settings(), log=LOG + line)
    (one,) = compared(tmp_path).results[1].condition.runs
    assert (one.asked, one.ran, one.reason) == ("fp8_hybrid", "fp32", "this torch was built without CUDA")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1]", "not a group of keys"),
        ("seed: {", "cannot be read"),
        ("a: &a [1, 1]\nb: [*a, *a]\n", "it has aliases"),
        ("[" * 5000, "cannot be read"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
        ("x" * 300_000, "it is too large"),
        ("seed: ${oc.env:HOME}", "is none: "),
    ],
)
def test_settings_of_a_stranger_are_refused_with_the_reason(text, why, tmp_path):
    folder = killed(tmp_path / "a", settings())
    (folder / ".hydra/config.yaml").write_text(text)
    (line,) = find_runs.below([folder], lambda *_: None).left_out
    assert line.startswith("a: it has no summary.json, and .hydra/config.yaml")
    assert why in line


def test_a_summary_that_is_there_is_what_counts(tmp_path, ended):
    """A resumed run has the summary of its first leg; nothing is mixed."""
    folder = killed(tmp_path / "fp8", settings())
    (folder / "summary.json").write_text(json.dumps({"status": "stopped", "config": settings(), "steps": 5}))
    (one,) = find_runs.below([folder], lambda *_: None).runs
    assert (one.status, one.steps) == ("stopped", 5)

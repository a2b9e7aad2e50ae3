"""Reading the folders of runs, which may be damaged or a stranger's, and telling conditions apart."""

import pytest

from gpt2_fp8.reports import runs
from tests.reports.made import rows, run, settings

LOGGED = rows(lambda step: 2.0, validations={100: 3.0})


def names(*tops):
    return [condition.name for condition in runs.conditions(runs.read(tops)[0])]


def test_what_a_run_left_is_read(tmp_path):
    run(tmp_path / "a", LOGGED, settings("fp8_hybrid", 3), skipped_steps=2)
    (one,), left_out = runs.read([tmp_path])
    assert (one.asked, one.ran, one.steps, one.memory_gb, left_out) == ("fp8_hybrid", "fp8_hybrid", 100, 20.0, [])
    assert (one.settings["optim.lr"], one.trouble) == (1e-3, {"steps skipped": 2})
    assert one.curve.validations.tolist() == [[10_000.0], [3.0]]


def test_a_damaged_log_is_read_as_far_as_it_is_good_and_noted(tmp_path):
    folder = run(tmp_path / "a", LOGGED)
    lines = (folder / "metrics.csv").read_text().splitlines()
    (folder / "metrics.csv").write_text("\n".join([*lines[:40], "41,garbage", *lines[50:], "101,7"]))
    ((one,), _) = runs.read([tmp_path])
    assert one.curve.mean(10_000, 10_000) == pytest.approx(2.0)
    assert "line 41" in one.damage


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: (folder / "summary.json").unlink(), "no summary.json"),
        (lambda folder: (folder / "summary.json").write_text("{"), "summary.json cannot be read"),
        (lambda folder: (folder / "metrics.csv").unlink(), "no training loss (completed)"),
        (lambda folder: (folder / "metrics.csv").write_text("a,b\n1,2\n"), "metrics.csv has no training loss"),
    ],
)
def test_what_cannot_be_read_is_left_out_with_the_reason(spoil, why, tmp_path):
    run(tmp_path / "good", LOGGED)
    spoil(run(tmp_path / "bad", LOGGED))
    found, (line,) = runs.read([tmp_path])
    assert [one.name for one in found] == ["good"]
    assert line.startswith("bad: ")
    assert why in line


def test_a_condition_is_named_by_as_few_keys_as_tell_it_from_others(tmp_path):
    """Precisions with different backends are told apart by the precision alone; two rates need the rate."""
    for seed in (1, 2):
        run(tmp_path / f"a{seed}", LOGGED, settings("bf16", seed, precision__backend="reference", run_name=f"{seed}"))
    run(tmp_path / "b", LOGGED, settings("fp8_hybrid", recipe__name="delayed", trainer__log_every_n_steps=10))
    assert names(tmp_path) == ["bf16", "fp8_hybrid"]
    run(tmp_path / "c", LOGGED, settings("fp8_hybrid", recipe__name="current", optim__lr=0.5))
    assert names(tmp_path) == ["bf16", "fp8_hybrid recipe=delayed", "fp8_hybrid recipe=current"]


def test_a_fall_back_is_its_own_condition_and_bf16_the_base(tmp_path):
    run(tmp_path / "a", LOGGED, settings("fp8_hybrid"))
    run(tmp_path / "b", LOGGED, settings("fp8_hybrid", 2), ran="fp32", reason="there is no CUDA GPU")
    run(tmp_path / "c", LOGGED, settings("bf16"))
    each = runs.conditions(runs.read([tmp_path])[0])
    assert [condition.name for condition in each] == ["fp8_hybrid", "fp8_hybrid (ran fp32)", "bf16"]
    assert [condition.fp8 for condition in each] == [True, False, False]
    assert (runs.base_of(each).name, runs.base_of(each[:2]).name) == ("bf16", "fp8_hybrid (ran fp32)")

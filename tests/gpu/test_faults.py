"""Faults of docs/reliability.md as a GPU meets them: whole runs in FP8, small."""

import gc
import itertools
import logging
import math
import statistics

import pytest
import torch

from gpt2_fp8.checkpoint.files import read
from gpt2_fp8.engine.evaluation import Evaluation
from gpt2_fp8.fp8.scaling import FP8Scaling
from tests import runs
from tests.faults.pretended import InFP8Alone, NanLoss, NanWeight, put
from tests.gpu.common import hopper
from tests.gpu.test_runs import FUSED, GRAPHS, IN_BF16, ON_GPU
from tests.runs import assert_equal, assert_same_checkpoint, checkpoint, metrics, record_steps, summary, train

pytestmark = pytest.mark.fp8

ROADS = {
    "delayed": (["precision.backend=te"], ON_GPU), "current": (["recipe=current"], ON_GPU), "fused": (FUSED, ON_GPU),
    "graphs": (GRAPHS, ON_GPU), "bf16": ([], IN_BF16),
}  # fmt: skip
OURS = ("fused", "graphs")
IN_FP8 = [pytest.param(road, marks=hopper if road in OURS else ()) for road in ROADS if road != "bf16"]
EVERY_ROAD = [*IN_FP8, "bf16"]


def run(folder, road, *overrides):
    words, base = ROADS[road]
    return train(folder, *words, *overrides, base=base)


def losses(folder):
    return list(metrics(folder)["train_loss"].values())


def happened(folder):
    return [(event["step"], event["what"]) for event in summary(folder)["divergence"]["events"]]


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("road", EVERY_ROAD)
def test_18_with_deterministic_kernels_three_legs_equal_one_run_bit_for_bit(tmp_path, monkeypatch, road):
    words, base = ROADS[road]
    words = [*words, "trainer.deterministic=true"]
    steps = record_steps(monkeypatch)
    train(tmp_path / "whole", *words, base=base)
    whole = list(steps)
    steps.clear()
    runs.train_until(4, tmp_path / "legs", *words, base=base)
    scales = read(checkpoint(tmp_path / "legs", 4))["training_step"]["scaling"]
    assert any(name.endswith("scaling_bwd.scale") for name in scales) == (road in ("delayed", *OURS))
    if road in ("delayed", *OURS):
        monkeypatch.setattr(FP8Scaling, "calibrate", lambda *_: pytest.fail("calibrated although there were scales"))
    runs.train_until(8, tmp_path / "legs", "ckpt_path=last", *words, base=base)
    train(tmp_path / "legs", "ckpt_path=last", *words, base=base)
    assert steps == whole, "tokens, and losses to the last bit"
    one, other = (checkpoint(tmp_path / name, 12) for name in ("legs", "whole"))
    assert_same_checkpoint(one, other)
    assert_equal(*(read(path)["training_step"] for path in (one, other)), "scales")
    assert metrics(tmp_path / "legs")["val_loss"] == metrics(tmp_path / "whole")["val_loss"]


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("road", IN_FP8)
def test_30_a_step_that_goes_wrong_in_fp8_alone_is_run_again_in_bf16(tmp_path, monkeypatch, road):
    run(tmp_path / "clean", road)
    put(InFP8Alone(), monkeypatch)
    run(tmp_path / "run", road)
    assert happened(tmp_path / "run") == [(3, "rerun"), (5, "rerun")]
    assert summary(tmp_path / "run")["skipped_steps"] == 0
    ours, clean = losses(tmp_path / "run"), losses(tmp_path / "clean")
    assert ours[:6] == pytest.approx(clean[:6], rel=2e-3), "the two steps, those before, and the next"
    assert statistics.mean(ours) == pytest.approx(statistics.mean(clean), rel=0.01)
    gradients = [metrics(tmp_path / name)["grad_norm"] for name in ("run", "clean")]
    assert list(gradients[0].values())[:6] == pytest.approx(list(gradients[1].values())[:6], rel=0.05)


@pytest.mark.parametrize("road", IN_FP8)
def test_31_a_nan_weight_is_left_behind_for_a_checkpoint_without_it_and_bf16(tmp_path, monkeypatch, road):
    keys = ["callbacks.nonfinite_limit=2", "callbacks.checkpoint_every_n_steps=2", "trainer.val_check_interval=12"]
    run(tmp_path / "clean", road, *keys)
    put(NanWeight(), monkeypatch)
    steps = record_steps(monkeypatch)
    run(tmp_path / "run", road, *keys)
    assert happened(tmp_path / "run") == [(7, "skip"), (8, "skip"), (8, "rollback")]
    assert [step for step, *_ in steps] == [*range(1, 9), *range(5, 13)], "back to step 4, the newest that is sound"
    by_step = {}
    for step, tokens, _ in steps:
        assert by_step.setdefault(step, tokens) == tokens, "the same tokens once more"
    assert summary(tmp_path / "run")["precision"]["ran"] == "bf16"
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "clean"), rel=0.01)
    memory = summary(tmp_path / "run")["peak_memory_gb"], summary(tmp_path / "clean")["peak_memory_gb"]
    assert memory[0] < 2.5 * memory[1], "the model before the rollback is gone"


# ---- memory ----------------------------------------------------------------------------------------------------------

WIDE = [
    "model.n_layer=4", "model.n_embd=512", "model.n_head=8", "model.n_positions=512", "global_batch_size=48",
    "micro_batch_size=48", "trainer.max_steps=4", "trainer.val_check_interval=4", "data.val_sequences=48",
    "callbacks.checkpoint_every_n_steps=2",
]  # fmt: skip


@pytest.fixture
def room():
    """`room(share, peak)` leaves torch a part of the memory that a run needed, and returns the limit in GiB.

    peak: GiB that were allocated at once in that run. What was there without the run (other tests' objects, cuBLAS's
    workspaces) is no part of what it needed, and stays beside the share. Free blocks that torch has kept count as room.
    """

    def leave(share, peak):
        gc.collect()
        torch.cuda.empty_cache()
        there = torch.cuda.memory_allocated() / 2**30
        limit = there + share * (peak - there)
        torch.cuda.set_per_process_memory_fraction(limit / (torch.cuda.mem_get_info()[1] / 2**30))
        return limit

    gc.collect()
    torch.cuda.empty_cache()
    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("road", EVERY_ROAD)
def test_64_what_does_not_fit_is_done_in_smaller_micro_batches(tmp_path, monkeypatch, caplog, room, road):
    steps = record_steps(monkeypatch)
    run(tmp_path / "clean", road, *WIDE)
    clean = list(steps)
    steps.clear()
    limit = room(0.75, summary(tmp_path / "clean")["training_memory_gb"])
    run(tmp_path / "run", road, *WIDE)
    said = [record.message for record in caplog.records if "out of memory: micro_batch_size" in record.message]
    assert said
    assert said[0].startswith("out of memory: micro_batch_size 24 instead of 48")
    assert [tokens for _, tokens, _ in steps] == [tokens for _, tokens, _ in clean]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "clean"), rel=2e-3)
    assert summary(tmp_path / "run")["training_memory_gb"] < limit


@pytest.mark.parametrize("road", EVERY_ROAD)
def test_64_auto_finds_the_largest_part_that_fits(tmp_path, caplog, room, road):
    run(tmp_path / "clean", road, *WIDE)
    room(0.85, summary(tmp_path / "clean")["training_memory_gb"])
    caplog.clear()
    caplog.set_level(logging.WARNING)
    run(tmp_path / "run", road, *WIDE, "global_batch_size=144", "micro_batch_size=auto")
    sizes = [int(r.message.split()[4]) for r in caplog.records if "out of memory: micro_batch_size" in r.message]
    assert sizes[:2] == [72, 48]
    assert sizes[-1] in (36, 24), "what fits 85 % of what 48 need"
    assert read(checkpoint(tmp_path / "run", 4))["training_step"]["micro_batch_size"] == {
        "asked": 144,
        "fits": sizes[-1],
    }
    assert summary(tmp_path / "run")["steps"] == 4


@hopper
@pytest.mark.parametrize("evaluation", ["fp8", "bf16"])
def test_64_a_validation_takes_the_room_of_cuda_graphs(tmp_path, monkeypatch, caplog, evaluation):
    """Their memory is their own: where they have left nothing, a validation fits only once they are gone."""
    words = [
        *WIDE, "trainer.val_check_interval=2", "callbacks.fp8_health=false", "trainer.deterministic=true",
        f"precision.evaluation={evaluation}",
    ]  # fmt: skip
    steps = record_steps(monkeypatch)
    run(tmp_path / "clean", "graphs", *words)
    clean = list(steps)
    steps.clear()
    evaluate = Evaluation.sums

    def without_room(self, ids):
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_reserved() + 2**20
        torch.cuda.set_per_process_memory_fraction(kept / torch.cuda.mem_get_info()[1])
        try:
            return evaluate(self, ids)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    monkeypatch.setattr(Evaluation, "sums", without_room)
    caplog.clear()
    caplog.set_level(logging.WARNING)
    run(tmp_path / "run", "graphs", *words)
    said = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert said == ["no room for a validation beside training's CUDA graphs: they are recorded again after each"]
    assert steps == clean, "to the last bit: recording leaves no trace"
    assert metrics(tmp_path / "run")["val_loss"] == metrics(tmp_path / "clean")["val_loss"]


@pytest.mark.parametrize("road", IN_FP8)
def test_70_the_way_to_bf16_has_a_size_of_its_own(tmp_path, monkeypatch, caplog, room, road):
    """bf16 layers of plain torch keep more than those in FP8."""
    put(NanLoss(2, precision="fp8"), monkeypatch)
    words = [*WIDE, "callbacks.fp8_health=false"]  # its pass over a few sequences may take more than a step of these
    run(tmp_path / "clean", road, *words)
    needed = torch.cuda.max_memory_allocated() / 2**30, summary(tmp_path / "clean")["training_memory_gb"]
    room(0.8, max(needed))
    caplog.clear()
    run(tmp_path / "run", road, *words)
    smaller = "micro_batch_size in bf16", "micro_batch_size 24", "no room for a step in bf16 beside"
    said = [record.message for record in caplog.records]
    assert any(part in line for part in smaller for line in said)
    assert happened(tmp_path / "run") == [(2, "rerun")]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "clean"), rel=2e-3)


FP8_AND_BF16 = [*((road, "fp8") for road in ROADS if road != "bf16"), ("delayed", "bf16"), ("fused", "bf16")]
VALIDATED = [("bf16", []), *((road, [f"precision.evaluation={word}"]) for road, word in FP8_AND_BF16)]


@pytest.mark.parametrize(
    ("road", "words"), [pytest.param(*case, marks=hopper if case[0] in OURS else ()) for case in VALIDATED]
)
def test_66_validation_needs_no_more_memory_than_training(tmp_path, road, words):
    run(tmp_path / "run", road, *WIDE, "callbacks.sample_tokens=4", *words)
    report = summary(tmp_path / "run")
    assert 0 < report["validation_memory_gb"] <= report["training_memory_gb"]


# ---- shapes ----------------------------------------------------------------------------------------------------------

ODD = {
    "one sequence": ["micro_batch_size=1", "global_batch_size=3", "data.val_sequences=1"],
    "three of five": ["micro_batch_size=3", "global_batch_size=15", "data.val_sequences=5"],
    "not a multiple of 128": ["model.n_positions=48", "micro_batch_size=5", "global_batch_size=5",
                              "data.val_sequences=7"],
    "the smallest": ["model.n_positions=16", "model.n_embd=16", "model.n_head=1", "micro_batch_size=1",
                     "global_batch_size=1", "data.val_sequences=3"],
}  # fmt: skip
KINDS = {**{road: ROADS[road] for road in ("delayed", "current", *OURS)}, "block": (["recipe=block"], ON_GPU)}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [pytest.param(k, s, marks=hopper if k in (*OURS, "block") else ()) for k, s in itertools.product(KINDS, ODD)],
)
def test_74_lengths_and_batches_that_fp8_does_not_like_train_validate_and_sample(tmp_path, kind, shape):
    words, base = KINDS[kind]
    train(tmp_path / "run", *words, *ODD[shape], "callbacks.sample_tokens=3", "callbacks.sample_prompt=a", base=base)
    report = summary(tmp_path / "run")
    assert (report["status"], report["steps"], report["skipped_steps"]) == ("completed", 12, 0)
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "run"))
    assert math.isfinite(report["last_val_loss"])

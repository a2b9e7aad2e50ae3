"""Whole runs in FP8 on a GPU: what the CPU's tests of runs cannot show."""

import json
import logging
import statistics
from pathlib import Path

import pytest
import torch

from gpt2_fp8 import evaluate
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.engine.cuda_graphs import GraphedGradients
from gpt2_fp8.fp8.support import why_no_torchao
from gpt2_fp8.model.parameters import peak_bf16_flops
from tests.gpu.common import hopper
from tests.runs import metrics, summary, train, train_until

pytestmark = pytest.mark.fp8

ON_GPU = [
    "trainer=gpu", "model.n_layer=2", "model.n_embd=128", "model.n_head=2", "model.n_positions=128",
    "global_batch_size=16", "micro_batch_size=8", "trainer.max_steps=12", "trainer.val_check_interval=5",
    "optim.warmup_steps=2", "data.val_sequences=16", "trainer.log_every_n_steps=1", "precision.fallback=error",
    "callbacks.checkpoint_every_n_steps=4", "callbacks.sample_tokens=0", "callbacks.progress_bar=false",
]  # fmt: skip
FUSED = ["cuda_graphs=false", "precision.backend=fused"]
GRAPHS = ["cuda_graphs=true"]
THROUGH = [["precision.backend=te"], pytest.param(GRAPHS, marks=hopper)]
IN_BF16 = [o for o in ON_GPU if o != "precision.fallback=error"] + ["precision=bf16", "compile=false"]


@pytest.mark.parametrize("overrides", THROUGH, ids=" ".join)
def test_a_run_in_fp8_says_so_logs_its_speed_and_learns_as_one_in_bf16(tmp_path, overrides):
    train(tmp_path / "fp8", "callbacks.sample_tokens=8", *overrides, base=ON_GPU)
    train(tmp_path / "bf16", base=IN_BF16)
    report = summary(tmp_path / "fp8")
    assert report["status"] == "completed"
    assert report["precision"] == {"asked": "fp8_hybrid", "ran": "fp8_hybrid", "reason": None, "last_in_bf16": 0}
    assert report["peak_memory_gb"] > 0
    table, expected = metrics(tmp_path / "fp8"), metrics(tmp_path / "bf16")
    assert table["train_loss"][12] < table["train_loss"][1] - 0.1
    assert set(table) >= {"memory_gb", "tokens_per_second"}
    assert ("mfu_bf16" in table) == (peak_bf16_flops(report["device"]) is not None)
    assert table["grad_norm"][1] == pytest.approx(expected["grad_norm"][1], rel=0.05), "before any update"
    losses = [statistics.mean(found["train_loss"].values()) for found in (table, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@hopper
def test_by_default_the_fused_layers_run_and_small_micro_batches_as_graphs(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    replayed = []
    original = GraphedGradients.__call__
    monkeypatch.setattr(
        GraphedGradients, "__call__", lambda self, parts: replayed.append(len(parts)) or original(self, parts)
    )
    train(tmp_path / "run", base=ON_GPU)
    assert "layers     fused FP8 chain" in caplog.text
    assert replayed == [2] * 12
    train(tmp_path / "eager", "cuda_graphs=false", base=ON_GPU)
    assert len(replayed) == 12
    ours, expected = (metrics(tmp_path / name) for name in ("run", "eager"))
    for column in ("train_loss", "val_loss"):
        assert list(ours[column]) == list(expected[column])
        assert list(ours[column].values()) == pytest.approx(list(expected[column].values()), rel=2e-3)


BF16 = ([], IN_BF16)
CURRENT, BLOCK, TE, OURS, RECORDED = (
    (words, ON_GPU) for words in (["recipe=current"], ["recipe=block"], ["precision.backend=te"], FUSED, GRAPHS)
)
BY_TORCHAO = (["precision.backend=torchao", "recipe=current", "compile=false"], ON_GPU)
SWITCHES = {
    "current to bf16": (CURRENT, BF16), "bf16 to current": (BF16, CURRENT),
    "block to bf16": (BLOCK, BF16), "bf16 to block": (BF16, BLOCK),
    "fused to bf16": (OURS, BF16), "bf16 to graphs": (BF16, RECORDED),
    "te to graphs": (TE, RECORDED), "graphs to te": (RECORDED, TE),
    "te to torchao": (TE, BY_TORCHAO), "torchao to te": (BY_TORCHAO, TE),
    "fused to torchao": (OURS, BY_TORCHAO), "torchao to fused": (BY_TORCHAO, OURS),
}  # fmt: skip


@pytest.mark.parametrize(
    "switch", [pytest.param(s, marks=hopper if "fused" in s or "graphs" in s else ()) for s in SWITCHES]
)
def test_39_a_checkpoint_continues_in_another_precision_or_other_layers(tmp_path, switch):
    if "torchao" in switch and (reason := why_no_torchao()):
        pytest.skip(reason)
    (words, base), (then, other) = SWITCHES[switch]
    train_until(8, tmp_path / "run", *words, base=base)
    train(tmp_path / "run", "ckpt_path=last", *then, base=other)
    losses = metrics(tmp_path / "run")["train_loss"]
    before = max(abs(losses[i + 1] - losses[i]) for i in range(1, 8))
    assert abs(losses[9] - losses[8]) <= before
    assert summary(tmp_path / "run")["steps"] == 12


@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe=current"], ["recipe=block"], ["precision=fp8_e4m3"], ["precision.keep_bf16=[first,head]"],
        ["precision=fp8_e4m3", "precision.backend=te"], ["precision.keep_bf16=[last,head]", "precision.backend=te"],
        ["precision.keep_bf16=[first:1,blocks.*.projection]"], ["precision.backward=bf16"],
        ["recipe=block", "precision.backward=bf16", "precision.keep_bf16=[head]"],
        ["activation_checkpointing=mlp", "model.n_head=4"], ["model.dropout=0.1"],
        ["recipe=delayed", "recipe.amax_compute_algo=most_recent", "recipe.margin=1"],
        ["recipe=delayed", "recipe.margin=1", "precision.backend=te"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_recipe_and_format_learns(tmp_path, overrides):
    train(tmp_path / "run", *overrides, base=ON_GPU)
    losses = metrics(tmp_path / "run")["train_loss"]
    assert losses[12] < losses[1] - 0.1
    assert summary(tmp_path / "run")["skipped_steps"] == 0


OWN_RECIPE = """
from gpt2_fp8.runtime import registry


@registry.recipe("current in e4m3")
def recipe(precision):
    from transformer_engine.common.recipe import Float8CurrentScaling, Format

    return Float8CurrentScaling(fp8_format=Format.E4M3)
"""


def test_a_recipe_of_ones_own_is_that_recipe_and_continues(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_recipe.py").write_text(OWN_RECIPE)
    own = ["plugins=[own_recipe]", "recipe=registered", "recipe.factory='current in e4m3'"]
    train(tmp_path / "whole", *own, base=ON_GPU)
    train_until(8, tmp_path / "legs", *own, base=ON_GPU)
    train(tmp_path / "legs", "ckpt_path=last", *own, base=ON_GPU)
    train(tmp_path / "ours", "recipe=current", "precision=fp8_e4m3", base=ON_GPU)
    whole, legs, ours = (list(metrics(tmp_path / n)["train_loss"].values()) for n in ("whole", "legs", "ours"))
    assert summary(tmp_path / "whole")["precision"]["ran"] == "fp8_hybrid"
    assert legs == pytest.approx(whole, rel=2e-3)
    assert ours == pytest.approx(whole, rel=2e-3)


def test_mxfp8_is_refused_on_hopper_with_the_reason(tmp_path):
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU has MXFP8")
    with pytest.raises(UserError, match="recipe=mxfp8 cannot run on this GPU"):
        train(tmp_path / "run", "recipe=mxfp8", base=ON_GPU)
    assert summary(tmp_path / "run")["exit_code"] == 2


@pytest.mark.parametrize("overrides", THROUGH, ids=" ".join)
def test_validation_leaves_training_as_it_was(tmp_path, overrides):
    """The same losses whether or not validations in FP8, which record amaxes, run in between."""
    in_fp8 = ["trainer.val_check_interval=1", "precision.evaluation=fp8"]
    train(tmp_path / "often", *in_fp8, *overrides, base=ON_GPU)
    train(tmp_path / "never", "data.val_sequences=0", *overrides, base=ON_GPU)
    often, never = (metrics(tmp_path / name)["train_loss"] for name in ("often", "never"))
    assert list(often.values()) == pytest.approx(list(never.values()), rel=1e-3)


@pytest.mark.parametrize("overrides", [*THROUGH, pytest.param(FUSED, marks=hopper)], ids=" ".join)
@pytest.mark.parametrize("evaluation", ["fp8", "bf16"])
def test_an_average_of_weights_is_validated_and_no_fp8_copy_of_it_is_trained_with(
    tmp_path, monkeypatch, evaluation, overrides
):
    monkeypatch.chdir(tmp_path)
    words = [*overrides, f"precision.evaluation={evaluation}", "trainer.val_check_interval=1"]
    train(tmp_path / "bf16", *words, "optim.ema_decay=0.9", base=ON_GPU)  # where `evaluated` looks
    train(tmp_path / "plain", *words, base=ON_GPU)
    own, plain = (metrics(tmp_path / name) for name in ("bf16", "plain"))
    assert list(own["train_loss"].values()) == pytest.approx(list(plain["train_loss"].values()), rel=1e-3)
    assert abs(own["val_loss"][12] - plain["val_loss"][12]) > 0.02, "it is behind"
    of = f"precision.evaluation={evaluation}"
    assert evaluated(of) == pytest.approx(own["val_loss"][12], rel=2e-4)
    assert evaluated(of, "weights=raw") == pytest.approx(plain["val_loss"][12], rel=1e-3)


@pytest.mark.parametrize("overrides", [*THROUGH, pytest.param(FUSED, marks=hopper)], ids=" ".join)
def test_a_validation_in_bf16_is_of_the_weights_as_they_are_exported(tmp_path, monkeypatch, overrides):
    monkeypatch.chdir(tmp_path)
    for name in ("fp8", "bf16"):
        train(tmp_path / name, f"precision.evaluation={name}", *overrides, base=ON_GPU)
    ours, expected = (list(metrics(tmp_path / name)["train_loss"].values()) for name in ("bf16", "fp8"))
    assert ours == pytest.approx(expected, rel=1e-3)
    same = ["precision=bf16", *(word for word in overrides if word == "precision.backend=te")]
    losses = [evaluated(*words) for words in (same, ["precision.evaluation=fp8"])]
    found = summary(tmp_path / "bf16")["last_val_loss"]
    assert found == pytest.approx(losses[0], rel=2e-4)
    assert abs(found - losses[0]) < abs(found - losses[1])


@pytest.mark.parametrize("overrides", THROUGH, ids=" ".join)
def test_the_last_steps_in_bf16_are_those_of_a_run_that_goes_on_so(tmp_path, overrides):
    last = [*overrides, "precision.bf16_last_steps=4"]
    train(tmp_path / "whole", *last, base=ON_GPU)
    train_until(10, tmp_path / "legs", *last, "callbacks.checkpoint_every_n_steps=1", base=ON_GPU)
    train(tmp_path / "legs", *last, "ckpt_path=last", base=ON_GPU)
    train_until(8, tmp_path / "hand", *overrides, base=ON_GPU)
    compiled = [word for word in IN_BF16 if word != "compile=false"]
    train(tmp_path / "hand", "ckpt_path=last", *(w for w in overrides if w == "precision.backend=te"), base=compiled)
    whole, legs, hand = (metrics(tmp_path / name) for name in ("whole", "legs", "hand"))
    for other in (legs, hand):
        assert list(other["train_loss"]) == list(range(1, 13))
        assert list(other["train_loss"].values()) == pytest.approx(list(whole["train_loss"].values()), rel=1e-3)
    assert list(whole["fp8/scale_weight"]) == list(legs["fp8/scale_weight"]) == list(range(1, 9))
    assert {*whole["skipped_steps"].values(), *whole["bf16_reruns"].values()} == {0}


def evaluated(*words):
    """The loss of the run in the folder bf16, evaluated with other words."""
    assert evaluate.main(["ckpt_path=bf16", "compile=false", "out=found.json", *words]) == 0
    return json.loads(Path("found.json").read_text())["loss"]

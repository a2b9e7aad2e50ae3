"""Whole runs with rates of their own for tables and vectors: checkpoints with other groups, and the log."""

import pytest
import torch

from gpt2_fp8.checkpoint.files import read, read_weights
from gpt2_fp8.config.errors import UserError
from tests.runs import SMALL, checkpoint, metrics, train, train_until

CHOICES = ["adamw", "adamw_bf16", "muon"]
SAME = ["optim.embedding_lr=0.002", "optim.scalar_lr=0.002"]  # as optim.lr is
UNTIED = [*SMALL, "model.tied_head=false", "precision=fp32"]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("words", [([], SAME), (SAME, []), (SAME[:1], SAME[1:])], ids=["to", "from", "other"])
def test_a_checkpoint_goes_on_with_other_groups(tmp_path, choice, words):
    """Each moment goes to its parameter: with equal rates, the run is the one without groups of their own."""
    base = [*UNTIED, f"optimizer={choice}"]
    train(tmp_path / "whole", base=base)
    train_until(5, tmp_path / "legs", *words[0], base=base)
    train(tmp_path / "legs", *words[1], "ckpt_path=last", base=base)
    ends = [checkpoint(tmp_path / name, 12) for name in ("whole", "legs")]
    weights, others = map(read_weights, ends)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    states = [read(end)["optimizer_states"][0]["state"] for end in ends]
    assert all(torch.equal(states[0][i][name], states[1][i][name]) for i in states[0] for name in states[0][i])


@pytest.mark.parametrize("choice", CHOICES)
def test_a_rate_of_its_own_that_a_resume_leaves_out_is_said(tmp_path, caplog, choice):
    base = [*UNTIED, f"optimizer={choice}", "optim.schedule=constant", "optim.min_lr_ratio=1"]
    train_until(5, tmp_path / "run", "optim.embedding_lr=0.02", base=base)
    caplog.clear()
    train(tmp_path / "run", "ckpt_path=last", base=base)
    said = [record.getMessage() for record in caplog.records if "before: the" in record.getMessage()]
    (line,) = said
    assert line.startswith("learning rate of positions.weight, tokens.weight 2.0e-03 from step 6 on, 2.0e-02 before: ")


def test_the_log_has_the_rate_of_optim(tmp_path):
    """Also where no parameter has it: Muon has the matrices, and a tied head is the table."""
    own = ["optimizer=muon", "optimizer.matrix_lr=0.01", "optim.embedding_lr=0.03"]
    words = [*own, "optim.scalar_lr=0.05", "callbacks.checkpoint_every_n_steps=0"]
    train(tmp_path / "run", *words, "model.tied_head=true", base=UNTIED)
    logged = metrics(tmp_path / "run")["lr"]
    assert logged[3] == pytest.approx(0.002, rel=1e-6)
    saved = read(checkpoint(tmp_path / "run", 12))["optimizer_states"][0]["param_groups"]
    assert [group["initial_lr"] for group in saved] == [0.002, 0.03, 0.05, 0.01]
    assert saved[0]["params"] == []


def test_a_checkpoint_of_another_block_or_optimizer_is_refused_with_both_names(tmp_path):
    modern = ["model.mlp=relu_squared", "optimizer=muon"]
    train_until(4, tmp_path / "run", *modern, base=UNTIED)
    with pytest.raises(UserError) as told:
        train(tmp_path / "run", "ckpt_path=last", base=UNTIED)
    causes = [problem.cause for problem in told.value.problems]
    assert "the checkpoint is of another model: model.mlp is relu_squared there, gelu here" in causes
    assert any("holds the state of optimizer=muon, and this run has optimizer=adamw" in cause for cause in causes)
    # the weights are the checkpoint's, whatever a new run's would be
    train(tmp_path / "run", *modern, "model.depth_scaled_init=false", "ckpt_path=last", base=UNTIED)

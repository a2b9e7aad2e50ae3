"""An average of the weights and endings ranked while a run trains: what they give, and that training is as without."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpt2_fp8 import compose, evaluate, export, generate
from gpt2_fp8.checkpoint.files import read, read_weights
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.train.module import GPT2Module
from tests.runs import (
    EMULATED_FP8,
    IDS_OF_BYTES,
    assert_equal,
    assert_same_checkpoint,
    checkpoint,
    recorded,
    summary,
    training_step,
)

DECAY = 0.75
ITEMS = [
    {"ctx": "import", "endings": ["os", "qzxj vv", "sys as a long word"], "label": 0},
    {"ctx": "def f(a, b):", "endings": ["return a", "\x00\x01", "x"], "label": 2},
    {"ctx": "", "endings": ["a", "bcd"], "label": 1},
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run without and a run with both; their steps and logs. It validates at 5, 10 and 12."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    words = [*EMULATED_FP8, "callbacks.checkpoint_every_n_steps=1", "callbacks.keep_checkpoints=99"]
    average = [f"optim.ema_decay={DECAY}", "optim.ema_start_step=3"]
    ranking = [f"callbacks.ranking={folder / 'items.jsonl'}", "callbacks.ranking_every_n_steps=10"]
    plain = recorded(folder / "plain", *words, "callbacks.sample_tokens=4")
    return folder, plain, recorded(folder / "averaged", *words, *average, *ranking, "callbacks.sample_tokens=4")


def average_of(path):
    return read(path)["training_step"]["average"]


def test_training_is_as_without_them(runs):
    """Its forwards draw random numbers: the model has dropout."""
    folder, (steps, metrics), (own_steps, own) = runs
    assert own_steps == steps
    assert own["train_loss"] == metrics["train_loss"]
    assert_same_checkpoint(checkpoint(folder / "plain", 12), checkpoint(folder / "averaged", 12), averages=False)
    assert all(own["val_loss"][step] != metrics["val_loss"][step] for step in (5, 10, 12))
    assert list(own["ranking/acc"]) == list(own["ranking/acc_norm"]) == [10, 12]
    assert not (checkpoint(folder / "plain", 12) / "average.safetensors").exists()


def test_the_average_begins_after_its_first_step(runs):
    folder, mean = runs[0] / "averaged", {}
    for step in range(1, 13):
        weights = read_weights(checkpoint(folder, step))
        mean = weights if step <= 3 else {name: torch.lerp(mean[name], weights[name], 1 - DECAY) for name in weights}
        assert_equal(average_of(checkpoint(folder, step)), mean, str(step))
    assert_equal(load_file(checkpoint(folder, 12) / "average.safetensors"), mean, "its file")


def test_a_resume_begins_and_ends_it_and_says_so(runs, tmp_path, caplog, recwarn):
    """From a checkpoint of the run without it, and from one with it. A patience is given up too."""
    caplog.set_level("INFO")
    folder, (steps, _), _ = runs
    words = [*EMULATED_FP8, "callbacks.early_stopping_patience=9", "trainer.val_check_interval=12"]
    own, _ = recorded(
        tmp_path / "on", *words, f"ckpt_path={checkpoint(folder / 'plain', 10)}", f"optim.ema_decay={DECAY}",
        "callbacks.checkpoint_every_n_steps=1",
    )  # fmt: skip
    assert own == steps[10:]
    before, after = (read_weights(checkpoint(folder / "plain", step)) for step in (10, 11))
    mean = {name: torch.lerp(before[name], after[name], 1 - DECAY) for name in after}
    assert_equal(average_of(checkpoint(tmp_path / "on", 11)), mean, "average")
    assert "the average of weights begins after step 10" in caplog.text
    recwarn.clear()
    own, _ = recorded(tmp_path / "on", *EMULATED_FP8, f"ckpt_path={checkpoint(tmp_path / 'on', 11)}")
    assert own == steps[11:]
    assert "the average of weights ends with step 11" in caplog.text
    assert not [warning for warning in recwarn if "EarlyStop" in str(warning.message)]
    assert not (checkpoint(tmp_path / "on", 12) / "average.safetensors").exists()


def evaluated(*words):
    assert evaluate.main([*words, "out=result.json"]) == 0
    return json.loads(Path("result.json").read_text())


def test_every_program_takes_the_average_and_says_so(runs, tmp_path, monkeypatch, capsys):
    folder, _, (_, own) = runs
    run, weights = folder / "averaged", read_weights(checkpoint(folder / "averaged", 12))
    monkeypatch.chdir(tmp_path)
    found = evaluated(str(run), f"ranking={folder / 'items.jsonl'}")
    assert (found["weights"], found["loss"]) == ("ema", summary(run)["last_val_loss"])
    assert [found["ranking"][name] for name in ("acc", "acc_norm")] == [own[f"ranking/{name}"][12] for name in
                                                                       ("acc", "acc_norm")]  # fmt: skip
    raw = evaluated(str(run), "weights=raw")
    assert (raw["weights"], raw["loss"]) == ("raw", summary(folder / "plain")["last_val_loss"])
    assert evaluated(str(folder / "plain"))["weights"] == "raw"
    for program, words in ((evaluate, []), (generate, ["prompt=a"])):
        assert program.main([str(folder / "plain"), "weights=ema", *words]) == 2
        assert "weights=ema" in capsys.readouterr().err
    assert generate.main([str(run), "prompt=a", "tokens=2"]) == 0
    assert "ema weights" in capsys.readouterr().err

    for choice, expected in (("auto", average_of(checkpoint(run, 12))), ("raw", weights)):
        assert export.main([str(run), choice, "--weights", choice]) == 0
        theirs = load_file(tmp_path / choice / "model.safetensors")["transformer.wte.weight"]
        assert torch.equal(theirs, expected["tokens.weight"][: len(theirs)])
        assert ("decay of 0.75" in (tmp_path / choice / "README.md").read_text()) == (choice == "auto")
    module = GPT2Module.load_from_checkpoint(checkpoint(run, 12))
    assert_equal(dict(module.state_dict()), average_of(checkpoint(run, 12)), "module")


@pytest.mark.parametrize("words", [["precision=fp32"], EMULATED_FP8], ids=["skipped", "run again in bf16"])
def test_a_step_counts_once_if_its_update_was_made(words):
    step, bad = training_step(*words, f"optim.ema_decay={DECAY}"), [False]
    step.model.positions.weight.register_hook(lambda gradient: gradient * (float("nan") if bad[0] else 1.0))
    step(IDS_OF_BYTES)
    step.settle()
    before = {name: value.clone() for name, value in step.average.state_dict().items()}
    bad[0] = True
    step(IDS_OF_BYTES)
    bad[0] = False  # in bf16 it is finite
    step.settle()
    made = step.last.first is not None
    assert made != (words == ["precision=fp32"])
    for name, weight in step.model.named_parameters():
        expected = torch.lerp(before[name], weight.detach(), 1 - DECAY) if made else before[name]
        assert torch.equal(step.average.state_dict()[name], expected), name


def test_an_evaluation_that_fails_leaves_the_weights(monkeypatch):
    step = training_step("optim.ema_decay=0.5")
    step(IDS_OF_BYTES)
    step.settle()
    weights = {name: weight.detach().clone() for name, weight in step.model.named_parameters()}
    average = {name: value.clone() for name, value in step.average.state_dict().items()}
    with suppress(ZeroDivisionError), step.evaluation.forwards() as model:
        evaluated = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        raise ZeroDivisionError
    assert_equal(evaluated, average, "evaluated")
    assert_equal({name: weight.detach() for name, weight in step.model.named_parameters()}, weights, "weights")
    assert_equal(step.average.state_dict(), average, "average")


def test_what_has_no_effect_or_cannot_be_is_refused_together(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"ctx": "a"}')
    words = [
        "optim.ema_start_step=3", "callbacks.early_stopping_min_delta=1", "data.val_sequences=0",
        f"callbacks.ranking={tmp_path / 'bad.jsonl'}", "callbacks.ranking_every_n_steps=7",
    ]  # fmt: skip
    with pytest.raises(UserError) as caught:
        compose.preflight(words)
    said = " ".join(problem.cause for problem in caught.value.problems)
    for part in ("ema_start_step=3", "min_delta=1", "line 1", "val_sequences=0", "every_n_steps=7"):
        assert part in said, part
    with pytest.raises(UserError, match=r"ema_start_step=9, trainer.max_steps=9"):
        compose.preflight(["optim.ema_decay=0.9", "optim.ema_start_step=9", "trainer.max_steps=9"])

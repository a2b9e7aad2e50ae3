"""Runs that end by tokens or epochs: their steps, their rates, and what they keep."""

from dataclasses import MISSING, fields, is_dataclass, replace

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import own_words
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.fp8.resolve import resolve
from gpt2_fp8.train import setup
from gpt2_fp8.train.trained import from_checkpoint, to_plain
from tests.runs import SMALL, metrics, summary, train

STEP = 8 * 32  # tokens


@pytest.fixture
def text(tmp_path):
    """Settings for a text of 1,640 tokens in bytes: 6.4 steps."""
    path = tmp_path / "text.txt"
    path.write_text("To be or not to be, that is the question" * 41)
    return [
        "data=text_files", f"data.train_files=[{path}]", "data.tokenizer=bytes", "data.num_workers=0",
        "data.val_fraction=0", "data.val_sequences=0",
    ]  # fmt: skip


def test_a_run_of_two_epochs_keeps_their_ends_and_its_rates_end_with_it(tmp_path, text):
    words = [*text, "callbacks.keep_checkpoints=1", "callbacks.checkpoint_every_n_steps=4"]
    epochs = [*words, "trainer.max_epochs=2", "callbacks.keep_epochs=true"]
    train(tmp_path / "epochs", *epochs, "trainer.max_steps=null")
    told = summary(tmp_path / "epochs")
    assert (told["steps"], told["ended_by"], told["tokens"]) == (13, "trainer.max_epochs", 13 * STEP)
    assert sorted(path.name for path in (tmp_path / "epochs/checkpoints").glob("step-*")) == [
        "step-00000007", "step-00000013",
    ]  # fmt: skip
    train(tmp_path / "tokens", *words, "trainer.max_tokens=3583", "trainer.max_steps=14")
    told = summary(tmp_path / "tokens")
    assert (told["steps"], told["ended_by"]) == (13, "trainer.max_tokens")
    assert metrics(tmp_path / "tokens")["lr"] == metrics(tmp_path / "epochs")["lr"]
    assert metrics(tmp_path / "tokens")["train_loss"] == metrics(tmp_path / "epochs")["train_loss"]
    with pytest.raises(UserError, match=r"max_steps=10 ends before") as caught:
        train(tmp_path / "tokens", *words, "trainer.max_tokens=2600", "ckpt_path=last")
    assert "trainer.max_tokens" in caught.value.problems[0].remedy


def length(*words, typed=("optim.warmup_steps",)):
    (config,) = preflight([*SMALL, "run_name=length", *words])
    return setup.resolve_length(config, typed)


def test_a_run_that_ends_within_its_first_epoch_keeps_none(text):
    counted = length(*text, "trainer.max_epochs=2", "trainer.max_tokens=1024", "callbacks.keep_epochs=true")
    assert (counted.limit, counted.epoch_ends) == ("trainer.max_tokens", [])


def test_a_warm_up_beyond_the_epochs_is_shortened_if_it_is_a_groups_and_refused_if_typed(text):
    with pytest.raises(UserError, match="the warm-up is longer than the run"):
        length(*text, "trainer.max_epochs=1", "optim.warmup_steps=8")
    counted = length(*text, "trainer.max_epochs=1", "optim.warmup_steps=8", typed=())
    assert (counted.config.trainer.max_steps, counted.config.optim.warmup_steps) == (7, 0)


def test_the_log_has_a_warm_up_that_is_nearly_the_whole_run(tmp_path, caplog):
    (config,) = preflight(
        ["model=gpt2", "trainer=cpu", "precision=fp32", "trainer.max_steps=800", "micro_batch_size=2"]
    )
    with caplog.at_level("INFO"):
        setup.announce(config, resolve(config, "cpu"), 257, 1, tmp_path, None)
    tokens = "800 of 512 x 1,024 = 524,288 tokens, in micro-batches of 2 sequences"
    assert f"steps      {tokens}; 700 steps of warm-up" in caplog.messages


@pytest.mark.parametrize("precision", ["fp8_hybrid", "bf16"])
def test_a_checkpoint_from_before_these_limits_has_none_of_them(tmp_path, precision):
    """Nor any other key that has come since: each has a default in the schema, which is what runs did before it."""
    validated = [] if precision == "bf16" else ["precision.evaluation=fp8"]  # as all runs were, and new ones are not
    (config,) = preflight([*SMALL, "run_name=length", f"precision={precision}", *validated])
    plain, removed = to_plain(config), set()
    for group in fields(config):
        if is_dataclass(of := getattr(config, group.name)):
            removed |= {f"{group.name}.{key.name}" for key in fields(of) if key.default is not MISSING}
    for key in removed:
        group, name = key.split(".")
        del plain[group][name]
    for key in (at_top := {key.name for key in fields(config) if key.default is not MISSING}):
        del plain[key]
    assert at_top >= {"attention", "compile_mode"}
    assert removed >= {"optim.schedule", "trainer.max_time", "callbacks.keep_epochs", "model.rope_base"}
    assert ("precision.bf16_last_steps" in removed) == (precision == "fp8_hybrid")
    before = replace(config, logger=replace(config.logger, histograms_every_n_steps=0))  # there were none
    assert from_checkpoint({"hyper_parameters": plain}, tmp_path) == before


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["model=tiny"], 16),
        (["model=gpt2", "data.tokenizer=bytes"], 1),
        (["model=gpt2", "data.tokenizer=bytes", "micro_batch_size=2"], 2),
        (["model=gpt2", "data.tokenizer=bytes", "micro_batch_size=auto"], 1),
    ],
)
def test_a_micro_batch_on_a_cpu_takes_seconds_unless_it_was_typed(words, size):
    (config,) = preflight(["trainer=cpu", *words])
    assert setup.resolve_micro_batch(config, 1, "cpu", own_words.keys(words)).micro_batch == size
    (gpu,) = preflight(words)
    assert setup.resolve_micro_batch(gpu, 1, "cuda", own_words.keys(words)).micro_batch >= size

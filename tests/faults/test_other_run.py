"""Faults 13 to 17, 107, 108: continued with another model, other text, another schedule, another number of workers."""

import re

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.checkpoint import files
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import token_stream
from gpt2_fp8.train.language_model import LanguageModel
from gpt2_fp8.train.module import GPT2Module
from tests.runs import SMALL, checkpoint, metrics, record_steps, recorded, summary, train, train_until

SHORT = ["trainer.max_steps=6", "trainer.val_check_interval=6", "callbacks.checkpoint_every_n_steps=2"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun") / "run"
    train_until(4, folder, *SHORT)
    return checkpoint(folder, 4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("whole") / "run", *SHORT)


def refused(tmp_path, begun, *overrides):
    with pytest.raises(UserError) as error:
        train(tmp_path / "other", *SHORT, f"ckpt_path={begun}", *overrides)
    assert not (tmp_path / "other/checkpoints").exists() or not list((tmp_path / "other/checkpoints").glob("step-*"))
    return str(error.value)


def test_13_another_model_is_refused_with_every_difference(tmp_path, begun):
    said = refused(tmp_path, begun, "model.n_head=4", "model.bias=false")
    assert "of another model: model.n_head is 2 there, 4 here; model.bias is true there, false here" in said
    assert said.count("error:") == 1
    assert "model.n_layer is 1 there, 2 here" in refused(tmp_path, begun, "model.n_layer=2")


def test_13_weights_of_another_model_are_refused_in_one_line(tmp_path, begun):
    with pytest.raises(UserError) as error:
        train(tmp_path / "other", *SHORT, f"init_from={begun}", "model.vocab_size=512")
    (problem,) = error.value.problems
    assert re.fullmatch(r"the checkpoint does not fit the model: [^\n\t]*tokens\.weight[^\n\t]*", problem.cause)


ROPE = {"positions": "rope", "rope_base": 5e5}


@pytest.mark.parametrize(
    ("words", "there", "said"),
    [
        ("model.mlp=relu_squared", {}, ["model.mlp is gelu there, relu_squared here"]),
        ("model.n_head=4 model.n_layer=2", {}, ["model.n_layer is 1 there, 2 here", "model.n_head is 2 there, 4 here"]),
        ("model.norm_epsilon=1e-6", {}, ["model.norm_epsilon is 1e-05 there, 1e-06 here"]),
        ("model.positions=rope", ROPE, ["model.rope_base is 500000.0 there, null here"]),
        ("model.positions=rope model.rope_base=5e5 model.n_positions=16 model.rope_scaling=2", ROPE, ["rope_scaling"]),
        ("model.positions=rope model.rope_base=1e6 model.n_positions=64 model.rope_scaling=2", ROPE, []),  # lengthened
        ("model.positions=rope model.rope_base=10000 model.rope_scaling=1", {"positions": "rope"}, []),
        ("model.mlp_width=128 model.head_size=16 model.n_kv_head=2 model.vocab_size=300", {}, []),  # what null means
        ("model.dropout=0.1 model.depth_scaled_init=false seed=7", {"name": "another"}, []),
    ],
)
def test_13_weights_of_another_block_are_refused_although_their_shapes_agree(tmp_path, begun, words, there, said):
    state = files.read(begun)
    state["hyper_parameters"]["model"] |= there
    del state["model"]  # as in what import_hf writes
    files.write(tmp_path / begun.name, state)
    (config,) = compose.preflight([*SMALL, *words.split(), f"init_from={tmp_path / begun.name}"])
    if not said:
        GPT2Module(config)
        return
    for made in (GPT2Module, LanguageModel.from_config):
        with pytest.raises(UserError, match="the checkpoint is of another model: ") as refused:
            made(config)
        assert all(each in str(refused.value) for each in said)
        assert refused.value.exit_code == 2


def test_14_another_tokenizer_is_refused(tmp_path, begun):
    with pytest.MonkeyPatch.context() as patch:  # of the same size
        patch.setattr(token_stream, "fingerprint", lambda tokenizer: "merges of another text")
        assert "tokenizer" in refused(tmp_path, begun)


def test_108_no_validation_is_no_other_text_and_what_was_is_remembered(tmp_path, begun):
    train(tmp_path / "run", *SHORT, f"ckpt_path={begun}", "data.val_sequences=0")
    with pytest.raises(UserError, match="the validation text"):
        train(tmp_path / "run", *SHORT, "ckpt_path=last", "trainer.max_steps=7", "data.val_sequences=4")
    train(tmp_path / "run", *SHORT, "ckpt_path=last", "trainer.max_steps=7")
    assert summary(tmp_path / "run")["best_val_loss_step"] == 7


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.seed=7", "seed"),
        ("model.n_positions=16", "n_positions"),
        ("debug=overfit", "trainer.overfit_batches was 0, and is now 1"),
        ("seed=7", "this run cannot be continued exactly: seed was 1337, and is now 7"),
    ],
)
def test_15_other_text_is_refused(tmp_path, begun, override, named):
    said = refused(tmp_path, begun, override)
    assert named in said
    assert said.count("error:") == (2 if "n_positions" in override else 1)  # the text's, and the model's
    assert "lanes" not in said  # a key that there is not


def test_108_a_checkpoint_of_before_says_neither_its_validation_nor_what_it_repeats(tmp_path, begun):
    state = files.read(begun)
    del state["TokenDataModule"]["validation"]
    assert state["TokenDataModule"]["fingerprint"].pop("overfit_batches") == 0
    files.write(tmp_path / begun.name, state)
    assert "trainer.overfit_batches was 0, and is now 1" in refused(tmp_path, tmp_path / begun.name, "debug=overfit")
    train(tmp_path / "run", *SHORT, f"ckpt_path={tmp_path / begun.name}", "data.val_sequences=4")
    assert summary(tmp_path / "run")["status"] == "completed"


def test_16_another_length_and_schedule_are_taken(tmp_path, begun):
    longer = ["trainer.max_steps=8", "trainer.val_check_interval=8", "optim.lr=1e-3", "optim.schedule=linear"]
    train(tmp_path / "longer", *SHORT, f"ckpt_path={begun}", *longer)
    train(tmp_path / "new", *SHORT, *longer)
    assert summary(tmp_path / "longer")["steps"] == 8
    expected = metrics(tmp_path / "new")["lr"]
    assert metrics(tmp_path / "longer")["lr"] == {step: expected[step] for step in range(5, 9)}


@pytest.mark.parametrize(("override", "rounding"), [("data.num_workers=2", 0.0), ("micro_batch_size=2", 1e-5)])
def test_17_another_number_of_workers_or_micro_batch_loses_and_repeats_nothing(
    tmp_path, begun, whole, monkeypatch, override, rounding
):  # of ranks: tests/train/test_ranks.py
    steps = record_steps(monkeypatch)
    train(tmp_path / "run", *SHORT, f"ckpt_path={begun}", override)
    assert [step[:2] for step in steps] == [step[:2] for step in whole[0][4:]]
    losses, expected = ([float.fromhex(step[2]) for step in found] for found in (steps, whole[0][4:]))
    assert losses == pytest.approx(expected, rel=rounding, abs=0.0)

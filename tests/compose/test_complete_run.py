"""A complete run keeps the settings that it was trained with: in its folder, and in every table that reads it."""

import json
from dataclasses import asdict

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import UserError
from tests.runs import SMALL, forked

WORDS = ["model=tiny", "trainer=cpu", "precision=fp32", "optim.lr=2e-3", "trainer.max_steps=400", "run_name=one"]


@pytest.fixture
def complete(tmp_path, monkeypatch):
    """Write what a complete run leaves. Returns its folder, and what writes it anew with other words and entries."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs/one"

    def write(*words, **entries):
        (config,) = preflight([*WORDS, *words, "run_name=elsewhere"])
        saved = folder / "checkpoints/step-00000400"
        saved.mkdir(parents=True, exist_ok=True)
        (saved / "manifest.json").write_text("{}")
        found = {
            "status": "completed", "steps": 400, "ended_by": "trainer.max_steps", "config": asdict(config),
            "checkpoint": {"last": str(saved)}, "best_val_loss_step": 200,
            "precision": {"asked": config.precision.name},
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(found | entries))
        return folder

    write()
    return write


def refused(*words):
    with pytest.raises(UserError) as error:
        preflight([*WORDS, "ckpt_path=last", *words])
    (problem,) = error.value.problems
    return problem


@pytest.mark.usefixtures("complete")
def test_a_complete_run_is_refused_other_settings_with_every_key():
    cause, remedy = refused("optim.lr=5e-3", "optim.weight_decay=0.7")
    assert cause.startswith("optim.lr was 0.002 and is now 0.005, optim.weight_decay was 0.1 and is now 0.7, and the")
    assert "is complete: nothing would be trained with it" in cause
    assert "trainer.max_steps=401 or more trains on with it" in remedy
    assert preflight([*WORDS, "ckpt_path=last", "optim.lr=5e-3", "trainer.max_steps=401"])
    assert preflight([*WORDS, "ckpt_path=last", "optim.lr=5e-3", "run_name=other"])


def test_a_key_that_a_complete_run_did_not_have_yet_had_the_schemas_value(complete):
    folder = complete("precision=fp8_hybrid")
    found = json.loads((folder / "summary.json").read_text())
    del found["config"]["precision"]["bf16_last_steps"]
    (folder / "summary.json").write_text(json.dumps(found))
    cause, _ = refused("precision=fp8_hybrid", "precision.bf16_last_steps=6")
    assert cause.startswith("precision.bf16_last_steps was 0 and is now 6, and the run in")
    assert preflight([*WORDS, "ckpt_path=last", "precision=fp8_hybrid"])


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize("word", ["seed=7", "model.n_head=2", "global_batch_size=32", "optimizer=muon"])
def test_a_longer_run_is_no_way_out_where_its_checkpoint_would_be_refused(word):
    cause, remedy = refused(word)
    assert word.partition("=")[0] in cause
    assert "data.seed" not in cause, "it follows from the seed"
    assert "trains on" not in remedy


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize(
    "word",
    [
        *("seed=1337", "optim.lr=0.002", "notes=again", "micro_batch_size=1", "data.num_workers=2", "recipe=delayed"),
        *("logger=csv", "callbacks.sample_tokens=0", "trainer.log_every_n_steps=5", "trainer.max_steps=500"),
    ],
)
def test_a_complete_run_takes_what_decides_no_training(word):
    assert preflight([*WORDS, "ckpt_path=last", word])


def test_a_run_with_steps_left_takes_other_settings(complete):
    other = [*WORDS, "optim.lr=5e-3"]
    assert preflight([*other, "ckpt_path=best"]), "of step 200"
    complete(best_val_loss_step=400)
    with pytest.raises(UserError, match=r"optim\.lr was"):
        preflight([*other, "ckpt_path=best"])
    with pytest.raises(UserError, match=r"optim\.lr was"):
        preflight([*other, "ckpt_path=outputs/one/checkpoints/step-00000400"])
    complete(status="stopped", steps=300)
    assert preflight([*other, "ckpt_path=last"])
    (complete() / "checkpoints/step-00000400/manifest.json").unlink()
    assert preflight([*other, "ckpt_path=last"])


def test_a_run_that_its_time_or_its_epochs_have_ended_is_complete_within_the_same(complete):
    complete("trainer.max_time=00:01:00:00", ended_by="trainer.max_time", steps=300)
    assert "a larger trainer.max_time" in refused("trainer.max_time=00:01:00:00", "optim.lr=5e-3").remedy
    assert preflight([*WORDS, "ckpt_path=last", "trainer.max_time=00:02:00:00", "optim.lr=5e-3"])
    epochs = ["trainer.max_steps=null", "trainer.max_epochs=2"]
    complete(*epochs, ended_by="trainer.max_epochs")
    assert "a larger trainer.max_epochs" in refused(*epochs, "optim.lr=5e-3").remedy
    assert preflight([*WORDS, "ckpt_path=last", "trainer.max_steps=null", "trainer.max_epochs=3", "optim.lr=5e-3"])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"status": "completed", "steps": 400, "config": {"optim": 3}}'])
def test_a_summary_that_is_none_is_no_complete_run(complete, text):
    (complete() / "summary.json").write_text(text)
    assert preflight([*WORDS, "ckpt_path=last", "optim.lr=5e-3"])


@pytest.mark.whole
def test_the_folder_of_a_complete_run_stays_as_it_was_and_the_same_words_end_well(tmp_path):
    words = [*SMALL, "trainer.max_steps=2", "optim.warmup_steps=1", "run_name=one"]
    assert forked(*words, "optim.lr=2e-3", cwd=tmp_path).returncode == 0
    files = [tmp_path / "outputs/one" / name for name in ("summary.json", ".hydra/config.yaml")]
    before = [file.read_text() for file in files]
    other = forked(*words, "optim.lr=5e-3", "ckpt_path=last", cwd=tmp_path)
    assert other.returncode == 2
    assert "optim.lr was 0.002 and is now 0.005" in other.stderr
    assert [file.read_text() for file in files] == before
    same = forked(*words, "optim.lr=2e-3", "ckpt_path=last", cwd=tmp_path)
    assert same.returncode == 0, same.stderr
    assert "already complete: step 2 of 2 is saved" in same.stdout

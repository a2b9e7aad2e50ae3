"""`data.validation`: texts that are validated by themselves beside the run's own, and what is refused of them."""

import json
from pathlib import Path

import pytest

from gpt2_fp8 import compose, evaluate
from gpt2_fp8.config.errors import UserError
from tests.runs import SMALL, checkpoint, metrics, read, train

TEXT = [*SMALL, "data=text_files", "data.train_files=train.txt", "data.val_fraction=0.2", "data.tokenizer=bytes"]
SETS = ["data.validation.code.files=more/*.md", "data.validation.prose={files: [prose.txt], sequences: 5}"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    for name, line in {
        "train.txt": "one two three\n",
        "prose.txt": "four five six\n",
        "more/a.md": "x = (y, z)\n",
    }.items():
        (tmp_path / name).write_text("".join(f"{i} {line}" for i in range(300)))
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "link.txt").symlink_to("train.txt")
    return tmp_path


def test_each_text_has_its_loss_and_the_runs_own_is_what_it_is_without_them(here):
    train(here / "plain", base=TEXT)
    train(here / "sets", *SETS, base=TEXT)
    plain, logged = metrics("plain"), metrics("sets")
    for column in ("train_loss", "val_loss"):
        assert logged[column] == plain[column]
    assert logged["val_loss/code"].keys() == logged["val_loss/prose"].keys() == logged["val_loss"].keys()

    def losses(*words):
        assert evaluate.main(["sets", "out=found.json", *words]) == 0
        return json.loads(Path("found.json").read_text())

    whole = losses()
    assert (whole["loss"], whole["tokens"]) == (logged["val_loss"][12], 8 * 32)
    assert whole["sources"] == {name: logged[f"val_loss/{name}"][12] for name in ("code", "prose")}
    alone = losses(
        "data=text_files", "data.val_files=prose.txt", "data.val_sequences=5", "data.validation.x.files=more"
    )
    assert alone["loss"] == pytest.approx(whole["sources"]["prose"], rel=1e-6)
    assert alone["sources"] == {"x": pytest.approx(whole["sources"]["code"], rel=1e-6)}


def test_a_run_goes_on_with_other_texts_and_not_with_another_text_of_a_name(here):
    def saved(step):
        return read(checkpoint("run", step))["TokenDataModule"]["validation_sets"]

    train(here / "run", SETS[0], base=TEXT)
    more = ["ckpt_path=last", "trainer.max_steps=13"]
    with pytest.raises(UserError, match=r"data\.validation\.code was"):
        train(here / "run", *more, "data.validation.code.files=prose.txt", base=TEXT)
    train(here / "run", *more, SETS[1], base=TEXT)
    assert saved(13) == saved(12) | {"prose": saved(13)["prose"]}
    with pytest.raises(UserError, match=r"data\.validation\.code was"):  # also after a run without it
        train(here / "run", *more[:1], "trainer.max_steps=14", "data.validation.code.files=prose.txt", base=TEXT)


REFUSED = {
    "data.validation.code.files=gone.txt": "data.validation.code.files: gone.txt",
    "data.validation.code.fils=prose.txt": "data.validation.code.files",
    "data.validation.code.sequences=5": "neither files nor repo",
    "data.validation.code.sequences=0": "must be",
    "data.validation.code=prose.txt": "not a group of keys",
    "data.validation.a-b.files=prose.txt": "a-b",
    "data.validation.code={files: prose.txt, revision: x}": "data.validation.code.revision=x",
    "data.val_sequences=0": "data.val_sequences=0",
}


def test_what_makes_no_sense_is_refused_before_a_run(here):
    for word, reason in REFUSED.items():
        with pytest.raises(UserError) as told:
            compose.preflight([*TEXT, *(SETS if "val_sequences" in word else []), word])
        assert len(told.value.problems) == 1
        assert reason in str(told.value)
    two = ["data=mixture", "+data@data.sources.code=stdlib", "+data@data.sources.own=text_files"]
    two += ["data.sources.own.train_files=train.txt", "data.sources.own.tokenizer=bytes"]
    words = [*SMALL[:5], *two, "data.sources.own.validation.x.files=more", SETS[0]]
    with pytest.raises(UserError) as told:
        compose.preflight(words)
    assert [problem.cause.partition(": ")[0] for problem in told.value.problems] == [
        "data.sources.own.validation",
        "data.validation.code",
    ]


@pytest.mark.parametrize(("file", "reason"), [("short.txt", "too short: 10 tokens"), ("link.txt", "the run trains on")])
def test_what_only_the_text_tells_is_refused(here, file, reason):
    with pytest.raises(UserError, match=rf"data\.validation\.code: .*{reason}"):
        train(here / "run", f"data.validation.code.files={file}", base=TEXT)

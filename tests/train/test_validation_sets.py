"""`data.validation`: texts that are validated by themselves beside the run's own, and what is refused of them."""

import json
import shutil
from pathlib import Path

import pytest

from gpt2_fp8 import compose, evaluate
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.train import trained
from tests.data.tokenizers_made import write_json
from tests.runs import SMALL, checkpoint, metrics, read, train

TEXT = [*SMALL, "trainer.max_steps=4", "trainer.val_check_interval=2", "data=text_files", "data.train_files=train.txt",
        "data.val_fraction=0.2", "data.tokenizer=bytes"]  # fmt: skip
MIXED = ["data=mixture", "+data@data.sources.code=stdlib", "+data@data.sources.own=text_files",
         "data.sources.own.train_files=train.txt", "data.sources.own.tokenizer=bytes"]  # fmt: skip
SETS = ["data.validation.code.files=more/*.md", "data.validation.prose={files: [prose.txt], sequences: 5}"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The texts, and `run`, a run with both sets."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "more").mkdir()
    lines = {"train.txt": "one two three", "prose.txt": "four five six", "more/a.md": "x = (y, z)"}
    for name, line in lines.items():
        (folder / name).write_text("".join(f"{i} {line}\n" for i in range(300)))
    (folder / "short.txt").write_text("too short")
    (folder / "link.txt").symlink_to("train.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(folder / "run", *SETS, base=TEXT)
    return folder


@pytest.fixture(autouse=True)
def _here(made, monkeypatch):
    monkeypatch.chdir(made)


def test_each_text_has_its_loss_and_the_runs_own_is_what_it_is_without_them(tmp_path):
    train(tmp_path / "plain", base=TEXT)
    plain, logged = metrics(tmp_path / "plain"), metrics("run")
    for column in ("train_loss", "val_loss"):
        assert logged[column] == plain[column]
    assert logged["val_loss/code"].keys() == logged["val_loss/prose"].keys() == logged["val_loss"].keys()

    def losses(*words):
        assert evaluate.main(["run", f"out={tmp_path}/found.json", *words]) == 0
        return json.loads((tmp_path / "found.json").read_text())

    whole = losses()
    assert (whole["loss"], whole["tokens"]) == (logged["val_loss"][4], 8 * 32)
    assert whole["sources"] == {name: logged[f"val_loss/{name}"][4] for name in ("code", "prose")}
    words = ["data=text_files", "data.val_files=prose.txt", "data.val_sequences=5", "data.validation.x.files=more"]
    alone = losses(*words)
    assert alone["loss"] == pytest.approx(whole["sources"]["prose"], rel=1e-6)
    assert alone["sources"] == {"x": pytest.approx(whole["sources"]["code"], rel=1e-6)}


def test_a_run_goes_on_with_other_texts_and_not_with_another_text_of_a_name(made, tmp_path):
    def go_on(steps, *words):
        train(tmp_path / "run", "ckpt_path=last", f"trainer.max_steps={steps}", *words, base=TEXT)
        saved = read(checkpoint(tmp_path / "run", steps))["TokenDataModule"]["fingerprint"]
        return {name for name in saved if name.startswith("validation.")}

    shutil.copytree(made / "run", tmp_path / "run")
    with pytest.raises(UserError, match=r"data\.validation\.code was"):
        go_on(5, "data.validation.code.files=prose.txt")
    other = write_json(tmp_path / "other", [chr(i) for i in range(256)], ["</s>"], "</s>")
    with pytest.raises(UserError, match="the tokenizer") as told:
        go_on(5, *SETS, f"data.tokenizer={other}")
    assert len(told.value.problems) == 1, "the texts' ids differ for that alone"
    assert go_on(5, "data.validation.also.files=more", SETS[1]) == {"validation.also", "validation.prose"}
    with pytest.raises(UserError, match=r"data\.validation\.prose was"):
        go_on(6, "data.validation.prose.files=prose.txt")  # another number of sequences
    assert go_on(6) == set()


def test_a_mixture_that_was_saved_before_there_were_such_texts_is_read():
    (config,) = compose.preflight([*SMALL[:5], *MIXED])
    plain = trained.to_plain(config)
    for group in (plain["data"], *plain["data"]["sources"].values()):
        del group["validation"]
    assert trained.from_checkpoint({trained.KEY: plain}, Path("step")).data == config.data


REFUSED = {
    "data.validation.code.files=gone.txt": "data.validation.code.files: gone.txt",
    "data.validation.code.files=[prose.txt,link.txt]": "the run trains on",
    "data.validation.code.fils=prose.txt": "data.validation.code.files",
    "data.validation.code.sequences=5": "neither files nor repo",
    "data.validation.code.sequences=0": "must be",
    "data.validation.code=prose.txt": "not a group of keys",
    "data.validation.a-b.files=prose.txt": "a-b",
    "data.validation.code={files: prose.txt, revision: x}": "no revision x",
    "data.val_sequences=0": "data.val_sequences=0",
}


def test_what_makes_no_sense_is_refused_before_a_run():
    for word, reason in REFUSED.items():
        with pytest.raises(UserError) as told:
            compose.preflight([*TEXT, *(SETS if "val_sequences" in word else []), word])
        assert len(told.value.problems) == 1
        assert reason in str(told.value)
    words = [*SMALL[:5], *MIXED, "data.sources.own.validation.x.files=more", SETS[0]]
    with pytest.raises(UserError) as told:
        compose.preflight(words)
    assert [problem.cause.partition(": ")[0] for problem in told.value.problems] == [
        "data.sources.own.validation",
        "data.validation.code",
    ]


def test_what_only_the_text_tells_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.validation\.code: .*too short: 10 tokens"):
        train(tmp_path / "run", "data.validation.code.files=short.txt", base=TEXT)

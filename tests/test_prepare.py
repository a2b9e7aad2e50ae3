"""The program that fills the token cache: whole, as a user types it, also killed in the middle."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from gpt2_fp8 import prepare
from gpt2_fp8.config.errors import DataSourceLost
from gpt2_fp8.data import formats, reader
from tests import forkserver
from tests.data.corpora import write_jsonl
from tests.runs import SMALL, summary, train

BYTES = ["data.tokenizer=bytes", "data.num_workers=0"]
# A source of 40 units that notes each reading in the folder `read`; a unit takes `SECONDS` to read.
COUNTING = """
import os, time, uuid
from dataclasses import dataclass
from pathlib import Path
from gpt2_fp8.data.units import Corpus, Unit
from gpt2_fp8.runtime import registry

@registry.data_source("counting")
@dataclass
class Counting:
    config: object
    waits: tuple = ()

    def corpus(self):
        units = [Unit(name=f"unit-{i:02d}", path=f"{i}") for i in range(40)]
        return Corpus(train=units[2:], val=units[:2])

    def read(self, unit, counts):
        time.sleep(float(Path("seconds").read_text()))
        for i in range(5):
            yield f"{unit.name} document {i} " + "x" * (40 * int(unit.path) % 300)
        yield " "
        Path("read", f"{unit.name}.{uuid.uuid4().hex}").touch()
"""
PLUGIN = ["plugins=[counting]", "data=registered", "data.source=counting", "data.tokenizer=bytes"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys, *argv, code=0):
    assert prepare.main(list(argv)) == code
    return capsys.readouterr()


def counts(text):
    """{side: (units, tokens, documents)}, and the units that were tokenised, and that were there."""
    form = r"^(.*): ([\d,]+) units, ([\d,]+) tokens, ([\d,]+) documents"
    found = {m[1]: tuple(int(m[i].replace(",", "")) for i in (2, 3, 4)) for m in re.finditer(form, text, re.MULTILINE)}
    (new,) = re.findall(r"^cache: .* MB; ([\d,]+) units tokenised now, ([\d,]+) were there$", text, re.MULTILINE)
    return found, tuple(int(number.replace(",", "")) for number in new)


def jsonl(folder):
    folder.mkdir()
    for i in range(20):
        write_jsonl(folder / f"{i}.jsonl", [f"{folder.name} {i}.{j} " + "y" * (13 * i + j) for j in range(12)])
    return [f"train_files=[{folder.name}/*.jsonl]", "val_fraction=0.2"]


def mixture(folder):
    """The words of a run on a small mixture, whose sources have a cache and a validation of their own."""
    words = [*(word for word in SMALL if not word.startswith("data.")), "data=mixture", "data.weights={web: 3, own: 1}"]
    for name in ("web", "own"):
        own = [*jsonl(folder / name), "tokenizer=bytes", "num_workers=0", f"cache_dir=cache-{name}", "val_sequences=4"]
        words += [f"+data@data.sources.{name}=text_files", *(f"data.sources.{name}.{word}" for word in own)]
    return words


def alone(folder):
    own = [*jsonl(folder / "one"), "tokenizer=bytes", "num_workers=0", "cache_dir=cache"]
    return [*SMALL, "data=text_files", *(f"data.{word}" for word in own)]


def test_a_run_afterwards_reads_the_cache_alone(here, monkeypatch, capsys):
    (here / "more.txt").write_text("some other words\n" * 400)
    words = [*mixture(here), "data.validation.more.files=more.txt"]
    out = said(capsys, *words, "run_name=r").out
    sides, (new, there) = counts(out)
    sources = {"own training", "own validation", "web training", "web validation"}
    assert sides.keys() == {*sources, "more validation"}
    assert (new, there) == (sum(units for units, _, _ in sides.values()), 0)
    (command,) = re.findall(r"^next: python -m gpt2_fp8.run (.*)$", out, re.MULTILINE)
    assert shlex.split(command) == [*words, "run_name=r"]

    def gone(*_):
        raise AssertionError("the text is read")

    monkeypatch.setattr(formats, "read_unit", gone)
    train(here / "after", *words, base=[])
    reading = summary(here / "after")["data"]["reading"]
    assert reading["cache_hits"] == reading["units"] > 0
    again, (new, there) = counts(said(capsys, *words, "run_name=r").out)
    assert (again, new) == (sides, 0)


def start(here, *words):
    return forkserver.Popen(
        [sys.executable, "-m", "gpt2_fp8.prepare", *words],
        cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(here)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGKILL, -9)]
)
def test_it_goes_on_after_it_was_stopped(number, code, here):
    (here / "counting.py").write_text(COUNTING)
    (here / "read").mkdir()
    (here / "seconds").write_text("0.2")
    words = [*PLUGIN, "--all", "data.cache_dir=cache", "data.num_workers=2", "data.val_sequences=2"]
    words += ["model.n_positions=32"]
    process = start(here, *words)
    while len(list((here / "cache").glob("*.json"))) < 6:
        time.sleep(0.01)
        assert process.poll() is None, process.communicate()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "Traceback" not in err
    kept: set[str] = set()
    while kept != (kept := {path.stem for path in (here / "cache").glob("*.json")}):
        time.sleep(1.5)  # a killed program's workers end soon after it, each with its unit
    assert 6 <= len(kept) < 40
    if code > 0:
        assert 0 < sum(counts(out)[1]) <= len(kept)
        assert "not complete: the same command goes on from here" in out
    (here / "seconds").write_text("0")
    process = start(here, *words)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    sides, (new, there) = counts(out)
    assert (new, there) == (40 - len(kept), len(kept))
    assert (sides["training"][::2], sides["validation"][::2]) == ((38, 38 * 5), (2, 2 * 5))
    assert "38 empty" in out
    read = [path.name.partition(".")[0] for path in (here / "read").iterdir()]
    assert len(set(read)) == 40
    # Only what was in the midst of its reading or writing may have been read twice.
    assert len(read) - 40 <= 2
    assert len(list((here / "cache").glob("*.u16"))) == len(list((here / "cache").glob("*.json"))) == 40


def test_text_that_a_run_needs_only_a_part_of(here, capsys):
    words = [*alone(here), "run_name=r"]
    few = counts(said(capsys, *words, "--steps", "1").out)[0]["training"]
    run = counts(said(capsys, *words).out)[0]["training"]
    whole = counts(said(capsys, *words, "--all").out)[0]["training"]
    assert few[0] < run[0] < whole[0] == 20
    assert few[1] < run[1] < whole[1]
    first = [*words, "trainer.overfit_batches=1"]
    assert counts(said(capsys, *first).out)[0]["training"] == few


def test_a_cache_is_needed(here, capsys):
    words = [word for word in mixture(here) if "cache_dir" not in word]
    told = said(capsys, *words, code=2).err
    assert all(f"data.sources.{name}.cache_dir=null" in told for name in ("web", "own"))


def test_bad_input(here, capsys):
    err = said(capsys, "data.cache_dir=cache", "optim.lrr=3", "trainer.max_stepz=4", code=2).err
    assert err.count("error: there is no key") == 2
    (here / "file.txt").write_text("few.")
    words = ["data=text_files", "data.train_files=[file.txt]", "data.cache_dir=c", *BYTES]
    assert "text is too short: 4 tokens" in said(capsys, *words, code=2).err


def test_a_full_disk_and_a_lost_source(here, monkeypatch, capsys):
    words = alone(here)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(reader, "write_whole", full)
        told = said(capsys, *words, "--all", code=1)
    assert "No space left on device: 'cache'" in told.err
    assert "not complete: the same command goes on from here" in told.out

    def lost(*_):
        raise DataSourceLost("the hub does not answer")

    with monkeypatch.context() as patch:
        patch.setattr("gpt2_fp8.data.workers.UnitPool.take", lost)
        assert "does not answer" in said(capsys, *words, "--all", code=4).err

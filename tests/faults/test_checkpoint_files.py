"""Faults 06 to 12 and 25: what a disk, a copy or another version can make of a run's checkpoints."""

import json
import logging
import os
import random
import shutil
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.checkpoint import files, find, manifest, pointers, verify
from gpt2_fp8.checkpoint.files import CheckpointError
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.train import setup
from tests.runs import checkpoint, command, summary, train

STEPS = ["trainer.val_check_interval=4", "callbacks.keep_checkpoints=9"]
VERSION_1 = Path(__file__).parents[1] / "checkpoint" / "fixtures" / "version_1" / "step-00000003"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run of 8 steps with checkpoints at 4 and 8; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder, *STEPS, "trainer.max_steps=8")
    assert list(pointers.steps(folder / "checkpoints")) == [4, 8]
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def listed(path):
    return [*files.read_manifest(path)["files"], manifest.MANIFEST]


def resolve(run):
    """What `ckpt_path=last` means in the run's folder, as a start finds it."""
    return setup.checkpoint(continued(), run)


@cache
def continued():
    (config,) = compose.preflight(["trainer=cpu", "run_name=run", "ckpt_path=last"])
    return config


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1], ids=["nothing", "one byte", "half", "all but one byte"])
def test_06_a_truncated_file_is_passed_over(run, caplog, keep):
    newest, previous = checkpoint(run, 8), checkpoint(run, 4)
    names = listed(newest)
    assert len(names) == 5
    for name in names:
        whole = (newest / name).read_bytes()
        said = whole.rstrip()  # without the manifest's last newline it says the same
        (newest / name).write_bytes(said[: keep if isinstance(keep, int) else int(len(said) * keep)])
        caplog.clear()
        assert resolve(run) == previous, name
        assert f"{newest} cannot be read as a checkpoint: {name}" in caplog.text
        assert f"{previous} is the newest checkpoint that is whole" in caplog.text
        with pytest.raises(CheckpointError, match=name):
            files.read(newest)
        (newest / name).write_bytes(whole)
    assert resolve(run) == newest


def test_07_a_flipped_bit_is_noticed_400_times_of_400(run, caplog):
    newest, source = checkpoint(run, 8), random.Random(7)
    noticed, names = 0, listed(newest)
    for number in range(400):
        name = source.choice(names)
        whole = (newest / name).read_bytes()
        bit = source.randrange(len(whole) * 8)
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (newest / name).write_bytes(flipped)
        try:
            files.read(newest)
        except CheckpointError as error:
            noticed += name in str(error)
        if number % 10 == 0:
            caplog.clear()
            assert resolve(run) == checkpoint(run, 4), (name, bit)
            assert str(newest) in caplog.text
        (newest / name).write_bytes(whole)
    assert noticed == 400
    assert resolve(run) == newest


def test_07_a_run_continues_before_a_flipped_bit(run, caplog):
    newest = checkpoint(run, 8)
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[-100] ^= 1
    (newest / "model.safetensors").write_bytes(weights)
    with caplog.at_level(logging.WARNING):
        train(run, *STEPS, "trainer.max_steps=8", "ckpt_path=last")
    assert "model.safetensors has" in caplog.text
    assert summary(run)["status"] == "completed"
    assert files.read(newest)["global_step"] == 8  # trained again, and whole again


POINTERS = {
    "missing": (lambda path: path.unlink(), "there is no such file"),
    "zero bytes": (lambda path: path.write_bytes(b""), "it is empty"),
    "zeros": (lambda path: path.write_bytes(b"\0" * 4096), "Expecting value"),
    "half": (lambda path: path.write_bytes(path.read_bytes()[:20]), "line 2"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "it is a folder"),
    "a dangling link": (lambda path: (path.unlink(), path.symlink_to("nowhere")), "it is a link"),
    "a link": (lambda path: (path.rename(path.parent / "x"), path.symlink_to("x")), "it is a link"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "it is no regular file"),
    "out of the folder": (lambda path: point(path, "../../x", 4), "it names '../../x'"),
    "absolute": (lambda path: point(path, "/etc", 4), "it names '/etc'"),
    "gone": (lambda path: point(path, "step-00000009", 9), "step-00000009, which it names, is gone"),
    "another step": (lambda path: point(path, "step-00000008", 4), "is not the folder of a step"),
    "huge": (lambda path: os.truncate(path, 2**40), "1,099,511,627,776 bytes"),
}


def point(path, name, step):
    path.write_text(json.dumps({"checkpoint": name, "step": step, "val_loss": None}))


@pytest.mark.parametrize(("damage", "reason"), POINTERS.values(), ids=POINTERS.keys())
def test_08_a_pointer_that_is_none_is_passed_over(run, caplog, damage, reason):
    damage(run / "checkpoints" / "last.json")
    assert resolve(run) == checkpoint(run, 8)
    (line,) = [message for message in caplog.messages if "last.json is skipped" in message]
    assert reason in line


def test_08_a_damaged_best_is_an_error(run):
    folder = run / "checkpoints"
    best = Path(find.resolve("best", folder))
    (best / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 0 bytes") as error:
        find.resolve("best", folder)
    assert "ckpt_path=last" in error.value.problems[0].remedy
    (folder / "best.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"best\.json cannot be used: it is empty"):
        find.resolve("best", folder)


def test_09_nothing_whole_left_is_an_error_never_a_fresh_start(run):
    for step in (4, 8):
        (checkpoint(run, step) / "manifest.json").write_bytes(b"")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(CheckpointError, match="no whole checkpoint left") as error:
        train(run, "ckpt_path=last")
    assert error.value.exit_code == 2
    assert all(str(checkpoint(run, step)) in str(error.value) for step in (4, 8))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_09_a_folder_whose_checkpoints_are_gone_is_an_error_too(run):
    for step in (4, 8):
        shutil.rmtree(checkpoint(run, step))
    with pytest.raises(CheckpointError, match="step-00000008, which it names, is gone"):
        resolve(run)


def test_10_a_path_that_is_not_there_ends_with_2(run, tmp_path):
    with pytest.raises(UserError, match="does not exist") as refused:
        compose.preflight([f"ckpt_path={run}/checkpoints/step-00000099"])
    assert refused.value.exit_code == 2
    with pytest.raises(CheckpointError, match="no such folder"):
        find.resolve(f"{run}/checkpoints/step-00000099", run / "checkpoints")
    done = command(f"ckpt_path={run}/checkpoints/step-00000099", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 2
    assert list(tmp_path.iterdir()) == [run]


def test_11_a_newer_version_is_refused_and_both_are_named(run):
    path = checkpoint(run, 8)
    newer = json.loads((path / "manifest.json").read_text()) | {"version": 7}
    newer["written_by"]["gpt2_fp8"] = "9.9.9"
    (path / "manifest.json").write_text(json.dumps(newer))
    with pytest.raises(CheckpointError, match=r"format 7; this gpt2_fp8 .* reads up to 3") as error:
        find.resolve(str(path), run / "checkpoints")
    assert error.value.problems[0].remedy == "use gpt2_fp8 9.9.9 or later"


def test_12_a_checkpoint_of_version_1_loads_and_is_said_to_be_unchecked(tmp_path, caplog):
    path = Path(shutil.copytree(VERSION_1, tmp_path / "checkpoints" / VERSION_1.name))
    assert files.read_manifest(path)["version"] == 1
    assert find.resolve("last", path.parent) == path
    saved = files.read(path)
    assert files.read_weights(path).keys() == {"wte.weight", "h.0.bias", "head.weight"}
    assert len([message for message in caplog.messages if "format 1" in message]) == 1
    assert saved["global_step"] == 3
    assert saved["precision"]["ran"] == "bf16"
    assert saved["loops"][7] == 2**80
    assert saved["optimizer_states"][0]["param_groups"] == [{"betas": (0.9, 0.95)}]
    assert saved["state_dict"]["wte.weight"] is saved["state_dict"]["head.weight"] is saved["callbacks"]["held too"]
    generator = torch.Generator().manual_seed(3)
    weight, moment = torch.randn(2, 6, 4, generator=generator).unbind()  # what was written into it
    assert torch.equal(saved["state_dict"]["wte.weight"], weight)
    assert torch.equal(saved["optimizer_states"][0]["state"][0]["exp_avg"], moment)
    (path / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"state\.safetensors has 0 bytes of 5168"):
        files.read(path)


def test_12_a_run_continues_from_version_1(run):
    path = checkpoint(run, 8)
    older = {key: value for key, value in files.read_manifest(path).items() if key not in ("sha256", "precision")}
    sizes = {name: {"size": entry["size"]} for name, entry in older["files"].items()}
    (path / "manifest.json").write_text(json.dumps(older | {"version": 1, "files": sizes}))
    train(run, *STEPS, "trainer.max_steps=12", "ckpt_path=last")
    assert files.read_manifest(path)["version"] == 1
    assert files.read_manifest(checkpoint(run, 12))["version"] == 3


@pytest.mark.parametrize("pointed", [True, False])
def test_25_newest_is_by_step_whatever_the_clock_says(run, monkeypatch, pointed):
    newest, older = checkpoint(run, 8), checkpoint(run, 4)
    for path, seconds in ((newest, 10), (older, 4e9)):
        for entry in (*path.iterdir(), path):
            os.utime(entry, (seconds, seconds))
    if not pointed:
        (run / "checkpoints" / "last.json").unlink()
    for now in (0.0, 5e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert resolve(run) == newest
    for path in (newest, older):
        for entry in (*path.iterdir(), path):
            os.utime(entry, (1e9, 1e9))
    assert resolve(run) == newest


def test_25_a_clock_that_went_back_hides_no_damage(run, monkeypatch):
    """What was verified is remembered by more than a time that anyone can set."""
    monkeypatch.setattr(verify, "_SETTLED_SECONDS", -1e12)
    path = checkpoint(run, 8)
    assert resolve(run) == path
    for name in listed(path):
        whole, before = (path / name).read_bytes(), (path / name).stat()
        (path / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        os.utime(path / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert resolve(run) == checkpoint(run, 4), name
        (path / name).write_bytes(whole)
    assert resolve(run) == path

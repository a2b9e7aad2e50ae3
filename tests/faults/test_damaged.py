"""What a disk, a copy or another version can make of a run's checkpoints."""

import json
import os
import pickle
import random
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.checkpoint import durable, files, manifest, pointers
from gpt2_fp8.checkpoint.files import CheckpointError
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.train import setup
from tests.runs import checkpoint, summary, train

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


@cache
def continued():
    (config,) = compose.preflight(["trainer=cpu", "run_name=run", "ckpt_path=last"])
    return config


def resolve(run):
    """What `ckpt_path=last` means in the run's folder, as a start finds it."""
    return setup.find_start(continued(), run)


def truncated(path):
    path.write_bytes(path.read_bytes().rstrip()[:-1])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "truncated": truncated, "a flipped bit": flipped, "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink, "a folder": lambda path: (path.unlink(), path.mkdir()),
}  # fmt: skip
NAMES = [manifest.MODEL, manifest.OPTIMIZER, manifest.STATE, manifest.SKELETON, manifest.MANIFEST]


@pytest.mark.parametrize(("damage", "name"), [*zip(DAMAGES, NAMES, strict=True)])
def test_last_passes_over_a_damaged_file_to_the_newest_checkpoint_that_is_whole(run, caplog, damage, name):
    newest, previous = checkpoint(run, 8), checkpoint(run, 4)
    DAMAGES[damage](newest / name)
    assert resolve(run) == previous
    assert name in caplog.text
    with pytest.raises(CheckpointError):
        files.read(newest)


def test_no_flipped_bit_goes_unnoticed(run):
    newest, source = checkpoint(run, 8), random.Random(7)
    for _ in range(90):
        path = newest / source.choice(NAMES)
        whole = path.read_bytes()
        bit = source.randrange(len(whole) * 8)
        path.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
        with pytest.raises(CheckpointError):
            files.read(newest)
        path.write_bytes(whole)
    assert resolve(run) == newest


def test_a_run_continues_before_a_flipped_bit_and_finds_its_best_again(run):
    best = pointers.follow(run / "checkpoints", "best")
    flipped(checkpoint(run, 8) / manifest.MODEL)
    truncated(run / "checkpoints/best.json")
    train(run, *STEPS, "trainer.max_steps=8", "ckpt_path=last")
    assert summary(run)["status"] == "completed"
    assert files.read(checkpoint(run, 8))["global_step"] == 8  # trained again, and whole again
    assert pointers.follow(run / "checkpoints", "best") == best


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pointer_is_passed_over(run, damage):
    DAMAGES[damage](run / "checkpoints/last.json")
    assert resolve(run) == checkpoint(run, 8)


def test_pointers_with_digests_of_an_earlier_version_are_read(run):
    for path in (run / "checkpoints/last.json", run / "checkpoints/best.json"):
        durable.write_json(path, json.loads(path.read_text()) | {"manifest_sha256": "0" * 64, "sha256": "0" * 64})
    assert resolve(run) == checkpoint(run, 8)
    assert pointers.read(run / "checkpoints", "best") is not None


def test_nothing_whole_left_is_an_error_never_a_fresh_start(run):
    for step in (4, 8):
        (checkpoint(run, step) / "manifest.json").write_bytes(b"")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(CheckpointError, match="no whole checkpoint left") as error:
        train(run, "ckpt_path=last")
    assert error.value.exit_code == 2
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_newer_version_is_refused_and_both_are_named(run):
    path = checkpoint(run, 8)
    newer = json.loads((path / "manifest.json").read_text()) | {"version": 7}
    newer["written_by"]["gpt2_fp8"] = "9.9.9"
    (path / "manifest.json").write_text(json.dumps(newer))
    with pytest.raises(CheckpointError, match=r"format 7; this gpt2_fp8 .* reads up to 3") as error:
        pointers.resolve(str(path), run / "checkpoints")
    assert error.value.problems[0].remedy == "use gpt2_fp8 9.9.9 or later"


def test_a_checkpoint_of_version_1_loads_and_is_said_to_be_unchecked(tmp_path, caplog):
    path = Path(shutil.copytree(VERSION_1, tmp_path / "checkpoints" / VERSION_1.name))
    assert pointers.resolve("last", path.parent) == path
    saved = files.read(path)
    assert "format 1" in caplog.text
    assert saved["precision"]["ran"] == "bf16"
    assert saved["loops"][7] == 2**80
    assert saved["optimizer_states"][0]["param_groups"] == [{"betas": (0.9, 0.95)}]
    assert saved["state_dict"]["wte.weight"] is saved["state_dict"]["head.weight"] is saved["callbacks"]["held too"]
    generator = torch.Generator().manual_seed(3)
    weight, moment = torch.randn(2, 6, 4, generator=generator).unbind()  # what was written into it
    assert torch.equal(saved["state_dict"]["wte.weight"], weight)
    assert torch.equal(saved["optimizer_states"][0]["state"][0]["exp_avg"], moment)


def test_a_run_continues_from_version_1(run):
    path = checkpoint(run, 8)
    older = {key: value for key, value in files.read_manifest(path).items() if key not in ("sha256", "precision")}
    sizes = {name: {"size": entry["size"]} for name, entry in older["files"].items()}
    (path / "manifest.json").write_text(json.dumps(older | {"version": 1, "files": sizes}))
    train(run, *STEPS, "trainer.max_steps=12", "ckpt_path=last")
    assert files.read_manifest(path)["version"] == 1
    assert files.read_manifest(checkpoint(run, 12))["version"] == 3


def written(path, change):
    state = files.read(path)
    change(state)
    files.write(path, state)
    return path


def put(key, value):
    return lambda state: state["optimizer_states"][0]["state"][0].update({key: value})


CHANGES = {
    "no optimizer": (lambda state: state.pop("optimizer_states"), "optimizer_states"),
    "no loops": (lambda state: state.pop("loops"), "loops"),
    "moments of another shape": (put("exp_avg", torch.zeros(3)), "exp_avg 0"),
    "moments of another dtype": (put("exp_avg", torch.zeros(3, dtype=torch.int32)), "exp_avg 0"),
    "weights of another dtype": (
        lambda state: state["state_dict"].update({"model.norm.weight": torch.zeros(32, dtype=torch.int32)}),
        "model.norm.weight",
    ),
    "one weight more": (lambda state: state["state_dict"].update(more=torch.zeros(1)), "more"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_that_does_not_fit_ends_with_2_and_names_what(run, name):
    change, said = CHANGES[name]
    written(checkpoint(run, 8), change)
    with pytest.raises(UserError, match=said) as refused:
        train(run, *STEPS, "trainer.max_steps=12", "ckpt_path=last")
    assert refused.value.exit_code == 2


class Payload:
    def __reduce__(self):
        return os.mkdir, ("canary",)


@pytest.mark.parametrize("key", ["ckpt_path", "init_from"])
def test_a_pickle_is_never_opened(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.ckpt").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(UserError) as refused:
        train(tmp_path / "run", f"{key}={tmp_path}/a.ckpt")
    assert refused.value.exit_code == 2
    assert not (tmp_path / "canary").exists()

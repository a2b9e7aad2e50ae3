"""The folder: what is in it, that a crash at any moment leaves a readable one, and that a bad one is told as such."""

import contextlib
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpt2_fp8.checkpoint import durable, files, pointers


def checkpoint(step=3):
    generator = torch.Generator().manual_seed(step)
    weight, moment = torch.randn(2, 6, 4, generator=generator).unbind()
    return {
        "epoch": 0, "global_step": step, "callbacks": {"held too": weight},
        "state_dict": {"wte.weight": weight, "h.0.bias": torch.randn(4, generator=generator), "head.weight": weight},
        "optimizer_states": [{"state": {0: {"exp_avg": moment}}, "param_groups": [{"betas": (0.9, 0.95)}]}],
        "rng": [{"torch": generator.get_state()}], "loops": {"nan": float("nan"), 7: 2**80},
    }  # fmt: skip


def assert_reads_as(path, expected):
    found = files.read(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(found["state_dict"][name], tensor)
    assert found["state_dict"]["wte.weight"] is found["state_dict"]["head.weight"] is found["callbacks"]["held too"]
    moment = expected["optimizer_states"][0]["state"][0]["exp_avg"]
    assert torch.equal(found["optimizer_states"][0]["state"][0]["exp_avg"], moment)
    assert found["optimizer_states"][0]["param_groups"] == [{"betas": (0.9, 0.95)}]
    assert torch.equal(found["rng"][0]["torch"], expected["rng"][0]["torch"])
    assert found["loops"][7] == 2**80


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "step-00000003"
    files.write(path, checkpoint())
    return path


def test_round_trip_and_layout(saved):
    assert_reads_as(saved, checkpoint())
    names = {"model.safetensors", "optimizer.safetensors", "state.safetensors", "state.json", "manifest.json"}
    assert {path.name for path in saved.iterdir()} == names
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    (saved.parent / "other").touch()
    assert len({stat.S_IMODE(path.stat().st_mode) for path in [saved.parent / "other", *saved.iterdir()]}) == 1
    with pytest.raises(TypeError, match=r"loops\.x is a builtins\.set"):
        files.write(saved.parent / "odd", checkpoint() | {"loops": {"x": {1}}})
    assert sorted(path.name for path in saved.parent.iterdir()) == ["other", saved.name]
    manifest = files.read_manifest(saved)
    assert (manifest["format"], manifest["version"], manifest["global_step"]) == ("gpt2_fp8 checkpoint", 3, 3)
    assert manifest["written_by"].keys() - {"transformer_engine"} == {"gpt2_fp8", "torch", "lightning", "python"}
    assert "precision" not in manifest
    without = {"state_dict": {"w": torch.zeros(2)}, "optimizer_states": [], "precision": {"ran": "fp8_hybrid"}}
    files.write(saved.parent / "c", without)
    left = {path.name for path in (saved.parent / "c").iterdir()}
    assert left == {"model.safetensors", "state.json", "manifest.json"}
    assert files.read(saved.parent / "c")["optimizer_states"] == []
    assert files.read_manifest(saved.parent / "c")["precision"] == "fp8_hybrid"
    assert manifest["files"] == {
        name: {"size": (saved / name).stat().st_size, "sha256": hashlib.sha256((saved / name).read_bytes()).hexdigest()}
        for name in names - {"manifest.json"}
    }


def test_the_weights_are_plain_safetensors_under_their_own_names(saved):
    plain = load_file(saved / "model.safetensors")
    assert plain.keys() == {"wte.weight", "h.0.bias"}
    weights = files.read_weights(saved)
    assert weights.keys() == {"wte.weight", "h.0.bias", "head.weight"}
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    header = (saved / "model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + size])["__metadata__"] == {"format": "pt", "head.weight": "wte.weight"}


def test_what_is_read_does_not_depend_on_the_file(saved):
    found = files.read(saved)
    for path in saved.iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(found["state_dict"]["wte.weight"], checkpoint()["state_dict"]["wte.weight"])


class Killed(BaseException):
    """Ends a write the way a kill does: whoever catches it must not tidy up."""


def attempt(monkeypatch, action, stage):
    """Run `action`, killed just before its call number `stage` that changes the disk; the calls until then."""
    calls, rmtree = [], shutil.rmtree

    def wrap(function):
        def killed(*args, **kwargs):
            calls.append(function.__name__)
            if len(calls) > stage:
                raise Killed
            return function(*args, **kwargs)

        return killed

    with monkeypatch.context() as patch:
        for module, name in [(os, "rename"), (os, "replace"), (os, "fsync"), (os, "chmod"), (files, "save_file")]:
            patch.setattr(module, name, wrap(getattr(module, name)))
        # A killed process deletes nothing: from the kill on, neither does this one.
        patch.setattr(shutil, "rmtree", lambda *a, **k: None if len(calls) > stage else rmtree(*a, **k))
        with contextlib.suppress(Killed):
            action()
    return calls


@pytest.mark.parametrize("replacing", [False, True])
def test_killed_at_any_stage_a_readable_last_remains(tmp_path, monkeypatch, replacing):
    template = tmp_path / "template"
    for step in (1, 2):
        files.write(template / pointers.folder_name(step), checkpoint(step))
        pointers.write(template, "last", pointers.Pointer(pointers.folder_name(step), step, None))
    folder = tmp_path / "run"
    target = 2 if replacing else 3

    def save():
        path = folder / pointers.folder_name(target)
        files.write(path, checkpoint(target))
        pointers.write(folder, "last", pointers.Pointer(path.name, target, None))

    for stage in range(100):
        shutil.copytree(template, folder)
        calls = attempt(monkeypatch, save, stage)
        path = pointers.resolve("last", folder)
        step = files.read_manifest(path)["global_step"]
        assert step in {2, target}, calls
        assert_reads_as(path, checkpoint(step))
        if len(calls) <= stage:  # not killed: that was the whole of it
            break
        files.sweep(folder)
        assert all(files.is_checkpoint(entry) for entry in folder.iterdir() if entry.is_dir())
        assert pointers.resolve("last", folder).parent == folder
        assert {entry.name for entry in folder.iterdir()} >= {"step-00000001", "step-00000002", "last.json"}
        shutil.rmtree(folder)
    assert calls.count("rename") == (2 if replacing else 1)
    assert len(calls) >= 14
    assert step == target


def test_a_rename_that_fails_puts_the_old_one_back(saved, monkeypatch):
    rename = os.rename

    def fail(source, target):
        if Path(source).suffix == ".tmp":
            raise OSError("quota")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="quota"):
        files.write(saved, checkpoint(4))
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert files.read(saved)["global_step"] == 3


def test_sweep_keeps_what_stands_in_for_a_damaged_one(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        files.write(folder / pointers.folder_name(step), checkpoint(step))
    os.rename(folder / "step-00000001", folder / ".step-00000001.old")
    shutil.copytree(folder / "step-00000002", folder / ".step-00000002.old")
    shutil.copytree(folder / "step-00000003", folder / ".step-00000003.old")
    (folder / "step-00000002" / "manifest.json").unlink()
    (folder / ".last.json.tmp").touch()
    (folder / ".step-00000006.tmp").mkdir()
    files.sweep(folder)
    names = [".step-00000002.old", "step-00000001", "step-00000002", "step-00000003"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_remove_takes_checkpoints_alone(saved, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    files.remove(tmp_path / "precious")
    files.remove(saved)
    files.remove(saved)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_pointers_refuse_what_leads_elsewhere(tmp_path):
    for name in ("../x", "/etc", "step-1", "step-00000002", "", 5, "step-00000001\n"):
        durable.write_json(tmp_path / "last.json", {"checkpoint": name, "step": 1, "val_loss": None})
        assert pointers.read(tmp_path, "last") is None
    pointers.write(tmp_path, "last", pointers.Pointer("step-00000001", 1, float("nan")))
    assert pointers.read(tmp_path, "last") == pointers.Pointer("step-00000001", 1, None)
    for text in ("{", "[]", "", '{"step": 1}'):
        (tmp_path / "last.json").write_text(text)
        assert pointers.read(tmp_path, "last") is None


# ---- an earlier format; format 1 is in `faults/test_damaged` ---------------------------------------------------------

VERSION_2 = Path(__file__).parent / "fixtures" / "version_2" / "step-00000003"  # of a run in pretended FP8


def test_a_run_can_continue_from_a_checkpoint_of_version_2():
    assert files.read_manifest(VERSION_2)["version"] == 2
    state = files.read(VERSION_2)
    step = state["training_step"]
    assert step["micro_batch_size"] == {"asked": 4, "fits": 4}
    assert step["scaling"].pop("settings") == "fp8_hybrid, pretended"
    assert step["scaling"].pop("sequences") == 8
    assert {name: tensor.shape for name, tensor in step["scaling"].items()} == {
        f"model.scales.{direction}.{kind}": torch.Size([1] if kind == "scale" else [4, 1])
        for direction in ("scaling_fwd", "scaling_bwd")
        for kind in ("scale", "amax_history")
    }
    assert step["scaling"]["model.scales.scaling_fwd.scale"].item() == 448 / 2
    assert set(state["callbacks"]) == {"Checkpointing", "DivergenceGuard"}
    assert not {"FP8Precision", "micro_batch_size"} & state.keys()
    assert files.read_plain(VERSION_2, "training_step")["scaling"]["settings"] == "fp8_hybrid, pretended"


@pytest.mark.parametrize("state", [{}, {"training_step": {"scaling": {}}, "callbacks": {"Checkpointing": 1}}])
def test_what_has_the_present_keys_stays_as_it_is(state):
    assert files.upgrade(state) == state

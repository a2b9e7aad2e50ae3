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

from gpt2_fp8.checkpoint import durable, files, find, pointers
from gpt2_fp8.checkpoint.files import CheckpointError
from gpt2_fp8.checkpoint.manifest import sealed
from gpt2_fp8.config import bounded
from gpt2_fp8.config.errors import UserError


def checkpoint(step=3):
    generator = torch.Generator().manual_seed(step)
    weight, moment = torch.randn(2, 6, 4, generator=generator).unbind()
    return {
        "epoch": 0,
        "global_step": step,
        "callbacks": {"held too": weight},
        "state_dict": {"wte.weight": weight, "h.0.bias": torch.randn(4, generator=generator), "head.weight": weight},
        "optimizer_states": [
            {
                "state": {0: {"exp_avg": moment}},
                "param_groups": [{"betas": (0.9, 0.95)}],
            }
        ],
        "rng": [{"torch": generator.get_state()}],
        "loops": {"nan": float("nan"), 7: 2**80},
    }


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
    manifest = files.read_manifest(saved)
    assert (manifest["format"], manifest["version"], manifest["global_step"]) == ("gpt2_fp8 checkpoint", 3, 3)
    assert manifest["written_by"].keys() - {"transformer_engine"} == {"gpt2_fp8", "torch", "lightning", "python"}
    assert "precision" not in manifest
    assert manifest["files"] == {
        name: {"size": (saved / name).stat().st_size, "sha256": hashlib.sha256((saved / name).read_bytes()).hexdigest()}
        for name in names - {"manifest.json"}
    }


def test_the_manifest_says_what_it_was_trained_in(tmp_path):
    files.write(tmp_path / "c", checkpoint() | {"precision": {"asked": "auto", "ran": "fp8_hybrid"}})
    assert files.read_manifest(tmp_path / "c")["precision"] == "fp8_hybrid"


def test_a_state_too_large_to_be_read_is_not_written(saved, monkeypatch):
    monkeypatch.setattr(bounded, "LARGEST_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1,000 are read"):
        files.write(saved, checkpoint(4))
    monkeypatch.undo()
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert files.read(saved)["global_step"] == 3


def test_the_weights_are_plain_safetensors_under_their_own_names(saved):
    plain = load_file(saved / "model.safetensors")
    assert plain.keys() == {"wte.weight", "h.0.bias"}
    weights = files.read_weights(saved)
    assert weights.keys() == {"wte.weight", "h.0.bias", "head.weight"}
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    header = (saved / "model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + size])["__metadata__"] == {"format": "pt", "head.weight": "wte.weight"}


def test_what_has_no_tensors_has_no_file(tmp_path):
    files.write(tmp_path / "c", {"state_dict": {"w": torch.zeros(2)}, "optimizer_states": [], "global_step": 1})
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"model.safetensors", "state.json", "manifest.json"}
    assert files.read(tmp_path / "c")["optimizer_states"] == []


def test_files_are_as_readable_as_any_other(saved, tmp_path):
    (tmp_path / "other").touch()
    expected = stat.S_IMODE((tmp_path / "other").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in saved.iterdir()} == {expected}


def test_what_is_read_does_not_depend_on_the_file(saved):
    found = files.read(saved)
    for path in saved.iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(found["state_dict"]["wte.weight"], checkpoint()["state_dict"]["wte.weight"])


def test_a_value_that_cannot_be_kept_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match=r"loops\.x is a builtins\.set"):
        files.write(tmp_path / "c", checkpoint() | {"loops": {"x": {1}}})
    assert list(tmp_path.iterdir()) == []


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
        path = find.resolve("last", folder)
        step = files.read_manifest(path)["global_step"]
        assert step in {2, target}, calls
        assert_reads_as(path, checkpoint(step))
        if len(calls) <= stage:  # not killed: that was the whole of it
            break
        files.sweep(folder)
        assert all(files.is_checkpoint(entry) for entry in folder.iterdir() if entry.is_dir())
        assert find.resolve("last", folder).parent == folder
        assert {entry.name for entry in folder.iterdir()} >= {"step-00000001", "step-00000002", "last.json"}
        shutil.rmtree(folder)
    assert calls.count("rename") == (2 if replacing else 1)
    assert len(calls) >= 14
    assert step == target


def test_a_full_disk_is_an_os_error_and_the_old_one_stays(saved, monkeypatch):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = checkpoint() | {"state_dict": {"w": torch.zeros(1 << 20)}}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.write(saved, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert files.read(saved)["global_step"] == 3


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


def edit(path, **changes):
    """Change the manifest, its own digest too."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(sealed(manifest | changes)))


def unsealed(path):
    """Change the manifest, and leave its own digest as it was."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"global_step": 4}))


def no_file(path):
    path.rename(path.with_name("kept"))
    path.write_bytes(b"")


def cut(name, keep):
    def damage(path):
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[: int(len(data) * keep)])

    return damage


NAMES = ["model.safetensors", "state.json"]
DAMAGES = {
    "no folder": (shutil.rmtree, "there is no such folder"),
    "a file": (no_file, "it is a file, and checkpoints are folders"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no skeleton": (lambda path: (path / "state.json").unlink(), "state.json is missing"),
    "cut weights": (cut("model.safetensors", 0.5), "model.safetensors has"),
    "empty moments": (cut("optimizer.safetensors", 0), "optimizer.safetensors has 0 bytes"),
    "cut manifest": (cut("manifest.json", 0.5), "manifest.json cannot be read"),
    "empty manifest": (cut("manifest.json", 0), "manifest.json cannot be read"),
    "binary manifest": (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"), "cannot be read"),
    "list manifest": (lambda path: (path / "manifest.json").write_text("[]"), "is not one of"),
    "changed manifest": (unsealed, "manifest.json was changed after it was written"),
    "version no number": (lambda path: edit(path, version="2"), "has no version"),
    "version 0": (lambda path: edit(path, version=0), "has no version"),
    "no sizes": (lambda path: edit(path, files=dict.fromkeys(NAMES, 5)), "does not give the size"),
    "no digests": (lambda path: edit(path, files={n: {"size": 5} for n in NAMES}), "does not give the size and the"),
    "other format": (lambda path: edit(path, format="other"), "is not one of a gpt2_fp8 checkpoint"),
    "newer version": (lambda path: edit(path, version=4), "is of checkpoint format 4; this gpt2_fp8"),
    "a path for a file": (lambda path: edit(path, files={"../x": {"size": 1}}), "does not list"),
    "step no number": (lambda path: edit(path, global_step="3"), "lacks what it should hold"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_told_with_a_remedy(saved, damage, message):
    damage(saved)
    with pytest.raises(CheckpointError, match=message) as error:
        files.read(saved)
    assert isinstance(error.value, UserError)
    assert error.value.exit_code == 2
    assert all(problem.remedy for problem in error.value.problems)
    assert not files.is_checkpoint(saved)


def test_no_bit_of_the_manifest_changes_unnoticed(saved):
    file = saved / "manifest.json"
    whole = file.read_bytes()
    for bit in range(0, len(whole) * 8, 3):  # each of a byte's bits in turn
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            files.read_manifest(saved)


def test_a_manifest_cannot_name_files_elsewhere(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    edit(saved, files=manifest["files"] | {"../x": {"size": 1}})
    with pytest.raises(CheckpointError, match=r"lists '\.\./x'"):
        files.read(saved)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"state_dict": {"$tensor": "nowhere"}}', '{"$exec": 1}', "nonsense"])
def test_a_forged_skeleton_is_told(saved, text):
    (saved / "state.json").write_text(text)
    manifest = json.loads((saved / "manifest.json").read_text())
    forged = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    edit(saved, files=manifest["files"] | {"state.json": forged})
    with pytest.raises(CheckpointError, match=r"do not fit together|cannot be read"):
        files.read(saved)


def test_garbage_of_the_right_size_is_told(saved):
    size = (saved / "model.safetensors").stat().st_size
    (saved / "model.safetensors").write_bytes(b"\xff" * size)
    for read in (files.read, files.read_weights):
        with pytest.raises(CheckpointError, match=r"changed after it was written: by SHA-256, model\.safetensors has"):
            read(saved)


def test_sweep_follows_no_link_and_keeps_what_stands_in_for_a_damaged_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    files.write(tmp_path / "elsewhere" / "c", checkpoint(1))
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        files.write(folder / pointers.folder_name(step), checkpoint(step))
    os.rename(folder / "step-00000001", folder / ".step-00000001.old")
    shutil.copytree(folder / "step-00000002", folder / ".step-00000002.old")
    shutil.copytree(folder / "step-00000003", folder / ".step-00000003.old")
    (folder / "step-00000002" / "manifest.json").unlink()
    (folder / ".last.json.tmp").touch()
    for name in (".step-00000004.old", ".step-00000005.tmp"):
        (folder / name).symlink_to(tmp_path / "elsewhere" / "c")
    (folder / ".step-00000006.tmp").mkdir()
    (folder / ".step-00000006.tmp" / "inside").symlink_to(tmp_path / "elsewhere")
    (folder / ".dangling.tmp").symlink_to(tmp_path / "nowhere")
    files.sweep(folder)
    names = [".step-00000002.old", "step-00000001", "step-00000002", "step-00000003"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert files.read(tmp_path / "elsewhere" / "c")["global_step"] == 1


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
    for loss in ("NaN", "1e999", "1" + "0" * 400, "true", '"0.1"'):
        (tmp_path / "last.json").write_text(f'{{"checkpoint": "step-00000001", "step": 1, "val_loss": {loss}}}')
        assert pointers.read(tmp_path, "last") == pointers.Pointer("step-00000001", 1, None)
    for text in ("{", "[]", "", "[" * 10**6, '{"step": 1}'):
        (tmp_path / "last.json").write_text(text)
        assert pointers.read(tmp_path, "last") is None

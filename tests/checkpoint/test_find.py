"""`ckpt_path=last|best|PATH`."""

import logging
import os

import pytest
import torch

from gpt2_fp8.checkpoint import files, manifest, pointers
from gpt2_fp8.checkpoint.files import CheckpointError
from gpt2_fp8.checkpoint.manifest import digests
from gpt2_fp8.checkpoint.pointers import resolve


def save(folder, *steps):
    for step in steps:
        path = folder / pointers.folder_name(step)
        files.write(path, {"state_dict": {"w": torch.zeros(2)}, "global_step": step})
        pointers.write(folder, "last", pointers.Pointer(path.name, step, None))


def corrupt(path):
    (path / "model.safetensors").write_bytes(b"")


def test_nothing_at_all_means_a_fresh_start(tmp_path):
    assert resolve("last", tmp_path / "missing") is None
    (tmp_path / ".step-00000001.tmp").mkdir()  # killed in its very first save
    assert resolve("last", tmp_path) is None


def test_without_a_good_pointer_the_newest_by_step(tmp_path, caplog):
    save(tmp_path, 10, 9, 100_000_000)
    os.utime(tmp_path / "step-00000009", (2e9, 2e9))
    corrupt(tmp_path / "step-100000000")
    with caplog.at_level(logging.WARNING):
        assert resolve("last", tmp_path).name == "step-00000010"
    assert "step-100000000 cannot be read as a checkpoint: model.safetensors has 0 bytes" in caplog.text
    assert "step-00000010 is the newest" in caplog.text
    (tmp_path / "last.json").write_text("{")
    assert resolve("last", tmp_path).name == "step-00000010"


def test_a_branch_left_behind_comes_after_what_is_whole(tmp_path):
    save(tmp_path, 2, 6, 8, 4)
    assert resolve("last", tmp_path).name == "step-00000004"
    corrupt(tmp_path / "step-00000004")
    assert resolve("last", tmp_path).name == "step-00000002"
    corrupt(tmp_path / "step-00000002")
    assert resolve("last", tmp_path).name == "step-00000008"


def test_what_a_killed_writer_moved_aside_counts(tmp_path):
    save(tmp_path, 2, 4)
    (tmp_path / "step-00000004").rename(tmp_path / ".step-00000004.old")
    assert resolve("last", tmp_path).name == ".step-00000004.old"


def test_each_file_is_hashed_once(tmp_path, monkeypatch):
    hashed = []

    def counted(folder, names):
        hashed.extend(names)
        return digests(folder, names)

    save(tmp_path, 2)
    monkeypatch.setattr(manifest, "digests", counted)
    path = resolve("last", tmp_path)
    assert sorted(hashed) == ["model.safetensors", "state.json"]
    files.read(path)
    files.read_weights(path)
    assert len(hashed) == 2
    model = path / "model.safetensors"
    before = model.stat()
    model.write_bytes(b"\xff" * before.st_size)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    while model.stat().st_ctime_ns == before.st_ctime_ns:  # a clock of files may tick a hundred times a second
        os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match="changed after it was written"):
        files.read(path)


def test_checkpoints_of_which_none_is_good_are_an_error(tmp_path):
    save(tmp_path, 2, 4)
    corrupt(tmp_path / "step-00000002")
    corrupt(tmp_path / "step-00000004")
    with pytest.raises(
        CheckpointError, match=r"no whole checkpoint left: .*step-00000004 .*; .*step-00000002 "
    ) as error:
        resolve("last", tmp_path)
    assert error.value.exit_code == 2


def test_a_pointer_to_nothing_is_an_error_not_a_fresh_start(tmp_path):
    pointers.write(tmp_path, "last", pointers.Pointer("step-00000002", 2, None))
    with pytest.raises(CheckpointError, match=r"no whole checkpoint left: .*step-00000002, which it names, is gone"):
        resolve("last", tmp_path)


def test_best(tmp_path):
    save(tmp_path, 2, 4)
    with pytest.raises(CheckpointError, match="no best checkpoint"):
        resolve("best", tmp_path)
    pointers.write(tmp_path, "best", pointers.Pointer("step-00000002", 2, 0.5))
    assert resolve("best", tmp_path).name == "step-00000002"
    corrupt(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 0 bytes"):
        resolve("best", tmp_path)


def test_a_path_is_a_path(tmp_path):
    save(tmp_path, 2)
    assert resolve(str(tmp_path / "step-00000002"), tmp_path / "elsewhere") == tmp_path / "step-00000002"
    (tmp_path / "old.ckpt").touch()
    for wrong, message in [("typo", "no such folder"), ("old.ckpt", "it is a file"), ("", "it has no manifest.json")]:
        with pytest.raises(CheckpointError, match=message):
            resolve(str(tmp_path / wrong), tmp_path)

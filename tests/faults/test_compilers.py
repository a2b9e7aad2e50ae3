"""Compilers, folders and variables that keep torch or Triton from their work: by torch's own errors, in two lines."""

import os
import re
import subprocess

import pytest
from torch._inductor.compile_worker.subproc_pool import SubprocException
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime import torch_faults
from tests.data.hub_runs import ROOT
from tests.runs import SMALL, command

NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl."
BUILD = ["/usr/bin/gcc", "/tmp/a/cuda_utils.c", "-O3", "-shared", "-fPIC", "-o", "/tmp/a/cuda_utils.so"]


def by_inductor(error):
    """The error as Inductor hands it on: of the other it keeps an attribute."""
    return InductorError(error, None)


def caused(error):
    """An error that came while another was handled."""
    try:
        try:
            raise error
        except Exception:
            raise RuntimeError("a graph was not recorded")  # noqa: B904
    except RuntimeError as over:
        return over


TOLD = [
    (RuntimeError(NO_COMPILER), "Triton needs a C compiler, and there is none here", "CC=PATH"),
    (by_inductor(RuntimeError(NO_COMPILER)), "Triton needs a C compiler", "install gcc"),
    (SubprocException(f"Traceback\nRuntimeError: {NO_COMPILER}"), "Triton needs a C compiler", "install gcc"),
    (caused(subprocess.CalledProcessError(1, BUILD)), "/usr/bin/gcc has failed", "python3-dev"),
    (by_inductor(InvalidCxxCompiler()), "torch.compile needs a C++ compiler, and there is no g++", "compile=false"),
    (
        by_inductor(CppCompileError(["g++"], "g++ -x\na.cpp:1:10: fatal error: omp.h: No such file\n")),
        "it has failed: a.cpp:1:10: fatal error: omp.h: No such file",
        "compile=false",
    ),
    (PermissionError(13, "Permission denied", "/kept/triton/x"), "/kept/triton, where compiled", "TRITON_CACHE_DIR="),
    (OSError(28, "No space left on device", "/kept/torch/a/b.py"), "/kept/torch, where", "TORCHINDUCTOR_CACHE_DIR="),
    (SubprocException("OSError: [Errno 30] Read-only file system: '/kept/triton/ab'"), "Read-only", "TRITON_CACHE_DIR"),
    (OSError(30, "Read-only file system", "/home/me/.triton/cache/x"), "/home/me/.triton, where", "TRITON_CACHE_DIR"),
]


@pytest.mark.parametrize(("error", "cause", "remedy"), TOLD)
def test_131_what_a_compiler_lacks_is_told_with_what_to_install(monkeypatch, error, cause, remedy):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kept/torch")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/kept/triton")
    told = torch_faults.explained(error)
    assert told is not None
    (problem,) = told.problems
    assert cause in problem.cause
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access"),
        ValueError("Invalid"),
        PermissionError(13, "Permission denied", "/kept/torches/a"),
        subprocess.CalledProcessError(1, ["scontrol", "requeue"]),
        subprocess.CalledProcessError(1, "gcc -shared a.c"),
    ],
)
def test_131_no_other_error_is_taken_for_one(monkeypatch, error):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kept/torch")
    assert torch_faults.explained(error) is None


def test_131_a_folder_of_compiled_code_is_tried_before_training(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new/folder"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    torch_faults.check_folders(on_gpu=False)
    assert os.listdir(tmp_path / "new/folder") == []
    with pytest.raises(UserError, match="it is a file, not a folder\n  fix: TRITON_CACHE_DIR=FOLDER") as refused:
        torch_faults.check_folders(on_gpu=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc")
    with pytest.raises(UserError, match=r"/proc, where compiled code is kept \(TORCHINDUCTOR_CACHE_DIR\)"):
        torch_faults.check_folders(on_gpu=False)
    assert len(refused.value.problems) == 1


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CXX", "./file", "CXX=./file is none"),  # which nobody may execute
        ("CXX", "./nothing", "CXX=./nothing is none"),
        ("TORCHINDUCTOR_CACHE_DIR", "file", "file, where compiled code is kept"),
        ("TORCH_DISTRIBUTED_DEBUG", "x", "TORCH_DISTRIBUTED_DEBUG=x: The value of TORCH_DISTRIBUTED_DEBUG must be OFF"),
        ("TORCH_LOGS", "garbage", "TORCH_LOGS=garbage: torch has no such log"),
    ],
)
def test_131_a_run_that_torch_cannot_compile_ends_in_two_lines(tmp_path, name, value, told):
    (tmp_path / "file").write_text("")
    done = command(*SMALL, "compile=true", "run_name=r", cwd=tmp_path, PYTHONPATH=str(ROOT), **{name: value})
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*\n  fix: .*\n", done.stderr), done.stderr
    assert told in done.stderr

"""What is recorded of a machine: from what commands print, from files, and from processes that may crash."""

import json
import os
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from gpt2_fp8.diagnose import child, commands, offers, probe, probe_gpu, probe_host, steps
from gpt2_fp8.diagnose.facts import FORMAT, from_json, to_json
from gpt2_fp8.measure.case import Case as Measured
from gpt2_fp8.measure.case import Result, measure

TWO = """\
NVIDIA H200, 9.0, 143771, 4, 580.95.05
NVIDIA GB10, 12.1, [N/A], [N/A], 580.95.05
"""
HEADER = "| NVIDIA-SMI 580.95.05      Driver Version: 580.95.05      CUDA Version: 13.0     |"


def test_what_nvidia_smi_prints_is_read():
    gpus, version = probe_gpu.parse(TWO)
    assert version == "580.95.05"
    assert [(gpu.name, gpu.capability, gpu.memory_mib) for gpu in gpus.values()] == [
        ("NVIDIA H200", "9.0", 143771),
        ("NVIDIA GB10", "12.1", None),
    ]
    assert probe_gpu.newest_cuda(HEADER) == "13.0"
    assert probe_gpu.parse("No devices were found\n") == ({}, None)
    assert probe_gpu.newest_cuda("CUDA Version: N/A") is None


def test_gpus_without_a_driver_are_seen_on_the_bus(tmp_path, monkeypatch):
    for number, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]):
        device = tmp_path / f"sys/bus/pci/devices/{number}"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor)
        (device / "class").write_text(kind)
    monkeypatch.setattr(probe_gpu, "ROOT", tmp_path)
    assert probe_gpu._on_bus() == 1, "its audio, and another maker's GPU, are not counted"


def test_no_other_variable_is_recorded(monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "CUDA_SECRET"):
        monkeypatch.setenv(name, "secret")
    for name in ("NVTE_FUSED_ATTN", "LD_LIBRARY_PATH", "TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0")
    found = probe_host.environment()
    assert "secret" not in found.values()
    assert {"NVTE_FUSED_ATTN", "LD_LIBRARY_PATH", "TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES"} <= found.keys()


def test_a_disk_mounted_noexec(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not/there/yet"))
    found = probe_host.places()["Triton's cache"]
    assert found.path == str(tmp_path / "not/there/yet")
    assert (found.writable, found.executable) == (True, True)
    assert found.free
    disk = namedtuple("disk", "f_bavail f_frsize f_flag")
    monkeypatch.setattr(os, "statvfs", lambda path: disk(5, 4096, os.ST_NOEXEC))
    found = probe_host.places()["Triton's cache"]
    assert (found.free, found.executable) == (5 * 4096, False)


def test_a_file_in_the_place_of_a_cache_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file/cache"))
    assert not probe_host.places()["Triton's cache"].writable


def test_a_command_that_fails_or_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(commands.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert commands.output_of("nvidia-smi") == ("", "nvidia-smi is not installed")


def test_versions_and_what_is_wanted_are_the_projects_own():
    found = probe_host.libraries()
    assert found["torch"].version
    assert found["torch"].wanted == "<2.14,>=2.11"
    assert found["transformer-engine"].wanted


def test_every_backend_recipe_and_precision_is_asked_about():
    from gpt2_fp8.backends.resolve import BACKENDS, IN_FP8
    from gpt2_fp8.diagnose import verdict

    assert set(offers.BACKENDS) == set(BACKENDS)
    assert tuple(backend.name for backend in IN_FP8) == verdict.REAL, "in the order in which a run tries them"
    assert offers.RECIPES == ("delayed", "current", "rowwise", "block", "mxfp8")
    assert offers.IN_FP8 == ("fp8_hybrid", "fp8_e4m3")
    assert set(offers.PLAIN) == {"fp32", "bf16"}


def test_the_steps_that_are_measured_compose():
    found = steps.configs()
    assert {name: config.precision.name for name, config in found.items()} == {
        "fp8_hybrid": "fp8_hybrid",
        "bf16": "bf16",
    }
    assert found["bf16"].compile is True
    assert all(config.model.n_layer == 12 and config.micro_batch == 16 for config in found.values())


def test_a_step_from_what_was_measured():
    config = steps.configs()["bf16"]
    result = Result(status="ok", ran="bf16", backend="reference", tokens_per_second=32768.0)
    step = steps.step("bf16", config, result)
    assert (step.tokens, step.milliseconds, step.problem) == (16384, 500.0, None)
    step = steps.step("bf16", config, Result(status="out of memory", message="wanted 2 GiB"))
    assert (step.milliseconds, step.problem) == (None, "out of memory: wanted 2 GiB")


def test_facts_come_back_from_json():
    from tests.diagnose.machines import facts

    recorded = facts("h200_two")
    assert from_json(json.loads(json.dumps({"format": FORMAT, "facts": to_json(recorded)})), "x") == recorded


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """An nvidia-smi of two H200s on the PATH."""
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\ncase $1 in\n--query*) printf 'NVIDIA H200, 9.0, 143771, 4, 580.95.05\\n%.0s' 1 2;;\n"
        "topo) printf '\\033[4m\\tGPU0\\tGPU1\\033[0m\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X \\n';;\n"
        f"*) echo '{HEADER}';;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


@pytest.mark.whole
def test_two_gpus(nvidia_smi):
    driver, gpus = probe_gpu.record()
    assert (driver.version, driver.cuda, driver.error) == ("580.95.05", "13.0", None)
    assert list(gpus) == ["0", "1"]
    assert driver.links is not None
    assert driver.links.splitlines()[0].split() == ["GPU0", "GPU1"], "without the terminal's codes"


@pytest.mark.whole
def test_an_nvidia_smi_that_fails(nvidia_smi):
    nvidia_smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    driver, gpus = probe_gpu.record()
    assert gpus == {}
    assert driver.error is not None
    assert "version mismatch" in driver.error


@pytest.mark.whole
def test_an_nvidia_smi_that_hangs(nvidia_smi, monkeypatch):
    nvidia_smi.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(commands, "SECONDS", 0.2)
    assert "timed out" in (probe_gpu.record()[0].error or "")


@pytest.mark.whole
def test_a_step_that_cannot_be_measured_says_why():
    """Through the real child process: without a GPU a run on one is refused."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    config = steps.configs()["bf16"]
    step = steps.step("bf16", config, measure(Measured(config=config, steps=1, warmup=0), 120))
    assert (step.milliseconds, step.problem) == (
        None,
        "refused: trainer.accelerator=gpu, and torch sees no GPU here",
    )


CRASHING = """
import json, os, signal, sys
request = json.load(sys.stdin)
done = {}
for part in request["parts"]:
    if part == "cudnn":
        os.kill(os.getpid(), signal.SIGSEGV)
    if part == "torchao":
        done[part] = {"failed": "OSError: no"}
    else:
        done[part] = part.upper()
    open(sys.argv[1], "w").write(json.dumps(done))
"""


@pytest.mark.whole
def test_a_part_that_crashes_costs_itself_alone(tmp_path, monkeypatch):
    (tmp_path / "crashing.py").write_text(CRASHING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = ["torch", "cudnn", "torchao", "runs"]
    answers, failed = probe.ask({}, {}, parts, "crashing", 60)
    assert answers == {"torch": "TORCH", "runs": "RUNS"}
    assert failed.keys() == {"cudnn", "torchao"}
    assert "SIGSEGV" in failed["cudnn"] or "middle" in failed["cudnn"]
    assert failed["torchao"] == "OSError: no"
    answers, failed = probe.ask({}, {}, ["cudnn", "runs"], "crashing", 60)
    assert (answers, failed["cudnn"][:6]) == ({"runs": "RUNS"}, "killed")


@pytest.mark.whole
def test_this_machine():
    """Every part is answered, and as torch answers here."""
    import torch

    facts = probe.collect(offers.offers(), lambda _: None)
    assert facts.failed == {}
    assert (facts.torch.version, facts.torch.cuda) == (torch.__version__, torch.version.cuda)
    assert facts.torch.available == torch.cuda.is_available()
    assert facts.runs["bf16 reference"].works
    assert facts.runs["fp8_hybrid delayed emulated"].works
    if not torch.cuda.is_available():
        reason = facts.runs["fp8_hybrid delayed fused"].reason or ""
        assert reason.endswith("there is no CUDA GPU" if torch.version.cuda else "this torch was built without CUDA")


def test_the_childs_answers_are_the_facts_fields(monkeypatch):
    torch = child.torch()
    assert torch["error"] is None
    assert torch["version"]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "ModuleNotFoundError" in child.torch()["error"]


def test_the_files_of_this_process_are_listed(tmp_path, monkeypatch):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 1    /opt/my folder/libcudnn.so.9.14.0\n"
        "7f01-7f02 r--p 00000000 08:01 1    /opt/my folder/libcudnn.so.9.14.0\n"
        "7f02-7f03 rw-p 00000000 00:00 0 \n"
        "7f03-7f04 r-xp 00000000 08:01 2    /opt/lib/libcudnn_ops.so.9\n"
    )
    monkeypatch.setattr(child, "MAPPED", maps)
    assert child._mapped("libcudnn.so") == ["/opt/my folder/libcudnn.so.9.14.0"]
    monkeypatch.setattr(child, "MAPPED", Path("/nowhere"))
    assert child._mapped("libcudnn.so") == []

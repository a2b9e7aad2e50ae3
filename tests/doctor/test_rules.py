"""What is said of a machine: whether FP8 works, why not, and what mends it."""

from dataclasses import replace

import pytest

from gpt2_fp8 import doctor
from gpt2_fp8.measure.machine import Step
from tests.doctor.machines import GB10_CPU_TORCH, GIB, H200, STEPS, cpu, gb10, libraries, runs

NO_TE = runs("Transformer Engine is not there")
SYMBOL = "ImportError: transformer_engine_torch.so: undefined symbol: "
CUDA = "RuntimeError: Error 802: system not yet initialized"
NO_ENGINE = replace(H200, libraries=libraries(transformer_engine=None), runs=NO_TE)
TWO = replace(H200, gpus=H200.gpus * 2)
OLDER = {"available": False, "capability": None, "runs": NO_TE}


def engine(error):
    return replace(H200, errors={"transformer-engine": error}, runs=NO_TE)


def disk(name, **changed):
    return replace(H200, disks=H200.disks | {name: replace(H200.disks[name], **changed)})


WORKS = {
    "h200": (H200, "the fused layers"),
    "measured": (replace(H200, steps=STEPS), "the fused layers, 1.72 x bf16"),
    "l40s": (replace(H200, gpus=[("L40S", "8.9")], capability="8.9", runs=runs("no", "te")), "Transformer Engine"),
    "gb10": (gb10(), "torchao"),
}
BROKEN = {  # what is said in the first line, the command that mends it
    "no gpu": (cpu(), "there is no NVIDIA GPU", "precision.backend=emulated"),
    "no driver": (cpu(on_bus=True), "no driver for it", "ubuntu-drivers"),
    "container": (cpu(on_bus=True, container=True), "was not given", "--gpus all"),
    "driver updated": (cpu(on_bus=True, driver_error="version mismatch"), "version mismatch", "reboot"),
    "hidden": (replace(H200, environment={"CUDA_VISIBLE_DEVICES": ""}, **OLDER), "hides", "unset CUDA_VISIBLE_DEVICES"),
    "a100": (replace(H200, gpus=[("A100", "8.0")], capability="8.0"), "8.0, and FP8 needs 8.9", "precision=bf16"),
    "a100 and h100": (
        replace(H200, gpus=[("A100", "8.0"), ("H100", "9.0")], capability="8.0"), "8.0", "CUDA_VISIBLE_DEVICES=1",
    ),
    "older driver": (replace(H200, driver_cuda="12.4", **OLDER), "runs CUDA up to 12.4", "whl/cu128"),
    "torch for CPUs": (replace(H200, torch_cuda=None, **OLDER), "has no CUDA", 'pip install --force-reinstall "torch'),
    "torch breaks": (replace(H200, errors={"torch": "killed by SIGSEGV"}, **OLDER), "does not import", "pip install"),
    "other libraries": (
        replace(H200, errors={"torch": "undefined symbol"}, environment={"LD_LIBRARY_PATH": "/x"}, **OLDER),
        "does not import", "unset LD_LIBRARY_PATH",
    ),
    "no torch": (replace(H200, libraries=libraries(torch=None), **OLDER), "torch is not installed", "pip install -e ."),
    "fabric manager": (replace(H200, unavailable=CUDA, **OLDER), "CUDA does not start", "nvidia-fabricmanager"),
    "no engine": (NO_ENGINE, "is not installed", '".[fp8]"'),
    "no c++": (replace(NO_ENGINE, tools=H200.tools | {"c++": None}), "C++ compiler", "build-essential"),
    "another torch": (engine(SYMBOL + "_ZN3c10"), "2.20.2 does not load", "transformer-engine-torch==2.20.2"),
    "older cublas": (engine(SYMBOL + "cublasLtGroupedMatmul"), "2.20.2 does not load", "nvidia-cublas"),
    "two cudnns": (replace(H200, cudnn=None, cudnn_error="compiled with 9.14"), "cuDNN", "unset LD_LIBRARY_PATH"),
    "no compiler": (replace(H200, tools=H200.tools | {"cc": None}), "cc is missing", "build-essential"),
    "no headers": (replace(H200, tools=H200.tools | {"Python.h": None}), "Python.h is missing", "python3.12-dev"),
    "cache": (disk("Triton's cache", writable=False), "cannot be written", "TRITON_CACHE_DIR"),
    "step": (replace(H200, steps={"fp8_hybrid": Step(problem="illegal memory access")}), "illegal memory", None),
    "backends": (replace(H200, runs=runs("no backend has block sizes like these")), "block sizes like these", None),
}  # fmt: skip
WARNED = {
    "no nccl": (replace(TWO, nccl=None), "NCCL", "torch>="),
    "no flash": (replace(H200, libraries=libraries(flash_attn_4=None)), "FlashAttention", '".[fa4]"'),
    "outputs": (disk("outputs", free=GIB), "disk", "cd FOLDER"),
    "bf16 alone": (replace(H200, steps=STEPS | {"bf16": Step(problem="timed out")}), "a step", None),
    "torchao instead": (gb10(), "Transformer Engine", '".[fp8]"'),
}


def judged(facts):
    found = doctor.findings(facts)
    return found, doctor.verdict(facts, found)


@pytest.mark.parametrize("name", WORKS)
def test_fp8_works(name):
    facts, layers = WORKS[name]
    found, (works, line, remedy) = judged(facts)
    assert (works, remedy) == (True, None)
    assert layers in line
    assert [finding for finding in found if finding.status == "fail"] == []


@pytest.mark.parametrize("name", BROKEN)
def test_fp8_cannot_run_and_what_mends_it(name):
    facts, why, command = BROKEN[name]
    _, (works, line, remedy) = judged(facts)
    assert not works
    assert why in line
    assert (remedy is None) == (command is None)
    assert (command or "") in (remedy or "")


@pytest.mark.parametrize("name", WARNED)
def test_what_is_slower_or_missing_denies_nothing(name):
    facts, subject, command = WARNED[name]
    found, (works, *_) = judged(facts)
    assert works
    (warned,) = [finding for finding in found if finding.status == "warn"]
    assert (warned.subject, (command or "") in (warned.remedy or "")) == (subject, True)


def test_arm64_is_told_why_transformer_engine_does_not_build_and_what_has_it():
    """Both with a torch without CUDA, where the build fails, and with one that has it."""
    for facts in (GB10_CPU_TORCH, gb10()):
        told = " ".join(finding.why or "" for finding in judged(facts)[0])
        assert all(words in told for words in ("'NoneType'", "container", "torchao"))
    assert "no CUDA" in judged(GB10_CPU_TORCH)[1][1]

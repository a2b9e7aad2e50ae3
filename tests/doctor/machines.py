"""Machines whose facts are put together from data sheets, error messages and the reports of users."""

from dataclasses import replace

from gpt2_fp8.measure.machine import RUNS, Disk, Facts, Step

GIB = 2**30
PLACES = {"outputs": "/work/outputs", "Triton's cache": "/root/.triton/cache", "the temporary folder": "/tmp"}
H200 = Facts(
    gpt2_fp8="0.1.0", platform="Linux 6.8.0", machine="x86_64", python="3.12.3", container=False,
    driver="580.95.05", driver_cuda="13.0", driver_error=None, on_bus=True,
    gpus=[("NVIDIA H200", "9.0")],
    tools={"cc": "/usr/bin/cc", "c++": "/usr/bin/c++", "Python.h": "/usr/include/python3.12/Python.h"},
    libraries={"torch": "2.11.0", "transformer-engine": "2.20.2", "torchao": "0.18.0", "flash-attn-4": "4.0.0b36"},
    disks={name: Disk(path=path, free=200 * GIB, writable=True) for name, path in PLACES.items()},
    environment={}, torch_cuda="13.0", available=True, capability="9.0", nccl="2.28.9", cudnn="9.14.0",
    runs=dict.fromkeys(RUNS),
)  # fmt: skip
STEPS = {
    "fp8_hybrid": Step(backend="fused", tokens_per_second=221_100.0, milliseconds=74.1),
    "bf16": Step(backend="reference", tokens_per_second=128_400.0, milliseconds=127.6),
}


def runs(why, *able):
    """What the backends say: those of `able` compute every recipe that they have, the others say why not."""
    return {name: None if name.split()[1] in able else why for name in H200.runs}


def libraries(**changed):
    return H200.libraries | {name.replace("_", "-"): version for name, version in changed.items()}


def cpu(**changed):
    """Without a GPU, with torch for CPUs."""
    without = {"gpus": [], "on_bus": False, "driver": None, "driver_cuda": None, "available": False, "capability": None}
    torch = {"torch_cuda": None, "nccl": None, "libraries": libraries(torch="2.13.0+cpu", transformer_engine=None)}
    said = {"driver_error": "nvidia-smi is not installed", "runs": runs("this torch was built without CUDA")}
    return replace(H200, **(without | torch | said | changed))


def gb10(**changed):
    """ARM64, capability 12.1, without Transformer Engine."""
    own = {"machine": "aarch64", "gpus": [("NVIDIA GB10", "12.1")], "capability": "12.1"}
    without = libraries(transformer_engine=None, flash_attn_4=None)
    missing = {"libraries": without, "runs": runs("not installed", "torchao")}
    return replace(H200, **(own | missing | changed))


# A GB10 whose torch is older than the first with CUDA for ARM64 on the package index: the page of the doctor shows it.
GB10_CPU_TORCH = gb10(
    torch_cuda=None, available=False, capability=None, nccl=None, cudnn=None,
    libraries=libraries(torch="2.10.0+cpu", transformer_engine=None, torchao=None, flash_attn_4=None),
    runs=runs("this torch was built without CUDA"),
)  # fmt: skip

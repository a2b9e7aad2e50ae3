"""Rules on the GPUs and their driver. Each is a function of the facts alone."""

from __future__ import annotations

from collections.abc import Iterator

from gpt2_fp8.config import fp8_units
from gpt2_fp8.diagnose.facts import Facts, Gpu
from gpt2_fp8.diagnose.finding import Finding

GPU, DRIVER = "GPU", "driver"
EMULATE = "python -m gpt2_fp8.run precision.backend=emulated"
IN_BF16 = "python -m gpt2_fp8.run precision=bf16"
GIVEN = "docker run --gpus all --ipc=host IMAGE"
# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes: the first driver that runs any CUDA of this major version
FIRST_DRIVERS = {"12": "525", "13": "580"}
OLDER_TORCH = 'pip install --force-reinstall "torch=={}" --index-url https://download.pytorch.org/whl/cu{}'
_BUSY = 0.1  # the part of a GPU's memory that a display may take


def capability(facts: Facts) -> tuple[int, int] | None:
    """Return the compute capability of the GPU that a run would take; None if there is none, or none is known."""
    first = facts.gpus.get("0")
    return fp8_units.parsed(facts.torch.capability or (first.capability if first else None))


def has_gpu(facts: Facts) -> bool:
    """Return whether the machine has an NVIDIA GPU with a driver."""
    return bool(facts.gpus) or facts.torch.available or facts.driver.device_files


def may_fp8(facts: Facts) -> bool:
    """Return whether the GPU has FP8 units, or may have."""
    found = capability(facts)
    return has_gpu(facts) and (found is None or found >= fp8_units.NEEDED)


def gpu(facts: Facts) -> Iterator[Finding]:
    """Say whether there is a GPU with FP8 units."""
    if not has_gpu(facts):
        yield _no_gpu(facts)
        return
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1") and not facts.torch.available:
        what = f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"
        yield Finding(GPU, "fail", what, None, "unset CUDA_VISIBLE_DEVICES")
    for number, one in facts.gpus.items():
        yield _units(facts, number, one)
    if not facts.gpus and facts.torch.gpu:
        seen = Gpu(name=facts.torch.gpu, capability=facts.torch.capability, memory_mib=None, used_mib=None)
        yield _units(facts, "0", seen)
    yield from _busy(facts)


def _no_gpu(facts: Facts) -> Finding:
    if facts.driver.on_bus and facts.system.container:
        what = "the machine has an NVIDIA GPU, and this container was not given it"
        return Finding(GPU, "fail", what, "A container sees no GPU unless it is started with one.", GIVEN)
    if facts.driver.on_bus:
        what = "there is an NVIDIA GPU, and no driver for it"
        why = "The command is Ubuntu's; others: https://www.nvidia.com/drivers. Restart the machine afterwards."
        return Finding(GPU, "fail", what, why, "sudo ubuntu-drivers install")
    why = "Runs train in float32 on the CPU. The command shows what FP8 does to a loss, slowly."
    if facts.system.container:
        why += f" If the machine has a GPU, start the container with it: {GIVEN}"
    return Finding(GPU, "fail", "there is no NVIDIA GPU", why, EMULATE)


def _units(facts: Facts, number: str, one: Gpu) -> Finding:
    memory = f", {one.memory_mib / 1024:.0f} GiB" if one.memory_mib else ""
    name = f"{number}: {one.name}{memory}"
    found = fp8_units.parsed(one.capability)
    if found is None:
        return Finding(GPU, "warn", f"{name}: its compute capability is not known", "The driver does not say it.")
    if found >= fp8_units.NEEDED:
        why = None
        if found[0] != fp8_units.HOPPER:
            why = "The fused layers are made for Hopper. Here Transformer Engine's layers or torchao's compute."
        return Finding(GPU, "ok", f"{name}, compute capability {one.capability}: it has FP8 units", why)
    needed = ".".join(map(str, fp8_units.NEEDED))
    what = f"{name} has compute capability {one.capability}, and FP8 needs {needed}"
    known = {other: fp8_units.parsed(facts.gpus[other].capability) for other in facts.gpus}
    able = next((other for other, units in known.items() if units and units >= fp8_units.NEEDED), None)
    if may_fp8(facts):  # a run takes another GPU, or torch does not say yet which
        return Finding(GPU, "ok", what, "A run takes another GPU, the first that CUDA lists.")
    if able is not None:
        remedy = f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={able}"
        return Finding(GPU, "fail", what, f"GPU {able} has FP8 units. A run takes the first that it sees.", remedy)
    return Finding(GPU, "fail", what, "Ada, Hopper and Blackwell have FP8 units. This GPU trains in bf16.", IN_BF16)


def _busy(facts: Facts) -> Iterator[Finding]:
    for number, one in facts.gpus.items():
        if one.memory_mib and one.used_mib and one.used_mib > _BUSY * one.memory_mib:
            what = f"{number}: {one.used_mib / 1024:.1f} of {one.memory_mib / 1024:.1f} GiB are in use"
            why = "Another program holds them, or an earlier run that did not end. The command names it."
            yield Finding(GPU, "warn", what, why, "nvidia-smi")


def driver(facts: Facts) -> Iterator[Finding]:
    """Say whether the driver answers, and whether it can run torch's CUDA."""
    if not has_gpu(facts):
        return
    error, version = facts.driver.error, facts.driver.version
    if error and "version mismatch" in error:
        what = "the driver on the disk is not the one that is loaded"
        yield Finding(DRIVER, "fail", what, "It was updated, and the machine was not restarted.", "sudo reboot")
    elif error and not facts.torch.available:
        yield Finding(DRIVER, "fail", f"nvidia-smi fails: {error}", None, "sudo reboot")
    elif too_old(facts):
        yield _too_old(facts)
    else:
        newest = f", for CUDA up to {facts.driver.cuda}" if facts.driver.cuda else ""
        yield Finding(DRIVER, "ok", f"{version or 'its version is not known'}{newest}")


def too_old(facts: Facts) -> bool:
    """Return whether torch was built with a later major version of CUDA than the driver can run."""
    can, built = fp8_units.parsed(facts.driver.cuda), fp8_units.parsed(facts.torch.cuda)
    return bool(can and built and not facts.torch.available and built[0] > can[0])


def _too_old(facts: Facts) -> Finding:
    assert facts.torch.cuda
    assert facts.driver.cuda
    major = facts.torch.cuda.partition(".")[0]
    needed = FIRST_DRIVERS.get(major)
    what = f"driver {facts.driver.version} runs CUDA up to {facts.driver.cuda}, and torch has CUDA {facts.torch.cuda}"
    base = (facts.torch.version or "").partition("+")[0]
    why = f"The command takes a torch for CUDA 12.{' Or install driver ' + needed + ' or later.' if needed else ''}"
    return Finding(DRIVER, "fail", what, why, OLDER_TORCH.format(base, "128"))


def links(facts: Facts) -> Iterator[Finding]:
    """Say how several GPUs are connected."""
    if len(facts.gpus) < 2 or not facts.driver.links:
        return
    cells = [line.split() for line in facts.driver.links.splitlines()]
    rows = [row[1 : 1 + len(facts.gpus)] for row in cells if row and row[0].startswith("GPU")]
    between = {word for row in rows for word in row if word != "X" and not word.startswith("GPU")}
    nccl = f"NCCL {facts.torch.nccl}" if facts.torch.nccl else "no NCCL"
    if between and all(word.startswith("NV") for word in between):
        yield Finding("links", "ok", f"NVLink between all GPUs ({', '.join(sorted(between))}), {nccl}")
    elif between:
        why = "Several GPUs average their gradients over PCIe, which is slower than NVLink. One GPU is not affected."
        yield Finding("links", "ok", f"no NVLink between some GPUs ({', '.join(sorted(between))}), {nccl}", why)
    if facts.environment.get("NCCL_P2P_DISABLE") == "1":
        why = "GPUs then exchange gradients through the host's memory."
        yield Finding("links", "warn", "NCCL_P2P_DISABLE=1", why, "unset NCCL_P2P_DISABLE")


RULES = (gpu, driver, links)

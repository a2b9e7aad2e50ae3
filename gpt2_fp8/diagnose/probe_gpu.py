"""Records what NVIDIA's driver says of the GPUs, and whether the machine has any without it. Never raises."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from gpt2_fp8.diagnose.commands import output_of
from gpt2_fp8.diagnose.facts import Driver, Gpu

ROOT = Path("/")  # where the system's own files are
_FIELDS = ("name", "compute_cap", "memory.total", "memory.used", "driver_version")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # a PCI vendor, and the class of display controllers
_TERMINAL = re.compile(r"\x1b\[[\d;]*m")  # `nvidia-smi topo` underlines its header


def record() -> tuple[Driver, dict[str, Gpu]]:
    """Return the driver, and the GPUs by their numbers."""
    text, error = output_of("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    gpus, version = parse(text) if error is None else ({}, None)
    driver = Driver(
        version=version,
        cuda=newest_cuda(output_of("nvidia-smi")[0]) if error is None else None,
        error=error,
        device_files=(ROOT / "dev/nvidiactl").exists(),
        on_bus=_on_bus(),
        links=_TERMINAL.sub("", output_of("nvidia-smi", "topo", "-m")[0]).strip() if len(gpus) > 1 else None,
    )
    return driver, gpus


def parse(text: str) -> tuple[dict[str, Gpu], str | None]:
    """Return the GPUs and the driver's version from `nvidia-smi --query-gpu` with the fields above, as CSV.

    GPUs that share the host's memory (GB10) answer [N/A] for it.
    """
    gpus: dict[str, Gpu] = {}
    version = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS):
            continue
        name, capability, total, used, version = cells
        gpus[str(len(gpus))] = Gpu(
            name=name,
            capability=capability if re.fullmatch(r"\d+\.\d+", capability) else None,
            memory_mib=int(total) if total.isdigit() else None,
            used_mib=int(used) if used.isdigit() else None,
        )
    return gpus, version


def newest_cuda(text: str) -> str | None:
    """Return the newest CUDA that the driver can run, from the header of `nvidia-smi`."""
    found = re.search(r"CUDA(?: UMD)? Version:\s*([\d.]+)", text)
    return found[1] if found else None


def _on_bus() -> int:
    found = 0
    for device in (ROOT / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            found += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return found

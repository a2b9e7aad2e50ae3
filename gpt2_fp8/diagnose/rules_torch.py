"""Rules on PyTorch. Each is a function of the facts alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from gpt2_fp8.diagnose.facts import Facts, Library
from gpt2_fp8.diagnose.finding import Finding, Status
from gpt2_fp8.diagnose.rules_gpu import capability, has_gpu, may_fp8, too_old

TORCH = "torch"
FIRST_ON_ARM = Version("2.11")  # the first torch of the package index that has CUDA on ARM64
NOT_TRIED = "could not be run"  # how `measure.subprocesses` reports that it could not start a process
_MISSING = Library(version=None, wanted=None, error=None)


def fits(library: Library) -> bool:
    """Return whether the installed version is one that this project takes. NVIDIA's 2.11.0a0 counts as 2.11.0."""
    if library.version is None or library.wanted is None:
        return True
    try:
        return Version(Version(library.version).base_version) in SpecifierSet(library.wanted)
    except (InvalidVersion, InvalidSpecifier):
        return True


def without_folders(error: str) -> str:
    """Return an error of loading with the names of files alone, and without a full stop at its end."""
    return re.sub(r"(?<![\w:/])/(?:[^\s/:]+/)+", "", error).rstrip(". ")


def library(facts: Facts, name: str) -> Library:
    """Return what is known of a package."""
    return facts.libraries.get(name, _MISSING)


def install(facts: Facts) -> str:
    """Return the command that installs a torch with CUDA."""
    return f'pip install --force-reinstall "torch{in_order(library(facts, "torch").wanted)}"'


def in_order(wanted: str | None) -> str:
    """Return a specifier as people write it, the lower bound first."""
    return ",".join(sorted((wanted or "").split(","), key=lambda part: not part.startswith(">")))


def torch(facts: Facts) -> Iterator[Finding]:
    """Say whether torch imports, and whether it can use the GPU."""
    found = facts.torch
    if found.error:
        yield _does_not_import(facts)
    elif found.cuda is None:
        yield _for_cpus(facts)
    elif found.available:
        yield Finding(TORCH, "ok", f"{found.version}, CUDA {found.cuda}")
        yield from _architectures(facts)
    elif not has_gpu(facts):
        yield Finding(TORCH, "ok", f"{found.version}, CUDA {found.cuda}, and no GPU for it")
    elif not too_old(facts) and facts.environment.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        yield _cannot_use(facts)
    if not fits(library(facts, "torch")) and (found.cuda or not has_gpu(facts)):
        wanted = in_order(library(facts, "torch").wanted)
        what = f"torch {library(facts, 'torch').version} is not one of {wanted}, with which this was tested"
        why = "Transformer Engine comes after it: it is compiled against the torch that is installed."
        works = any(run.works and run.backend in ("te", "torchao") for run in facts.runs.values() if run.recipe)
        status: Status = "warn" if works or not may_fp8(facts) else "fail"
        yield Finding(TORCH, status, what, why, f'pip install "torch{wanted}"')


def _does_not_import(facts: Facts) -> Finding:
    error = facts.torch.error or ""
    what, said = "torch does not import", without_folders(error)
    if library(facts, "torch").version is None:
        return Finding(TORCH, "fail", "torch is not installed", None, "pip install -e .")
    if error.startswith(NOT_TRIED):
        why = f"{said}. Processes exchange files in the temporary folder."
        return Finding(TORCH, "fail", "torch could not be tried", why, "export TMPDIR=FOLDER_OF_YOURS")
    if facts.environment.get("LD_LIBRARY_PATH") and ("undefined symbol" in error or "cannot open shared" in error):
        why = f"{said}. LD_LIBRARY_PATH puts libraries of another CUDA before those that torch brings."
        return Finding(TORCH, "fail", what, why, "unset LD_LIBRARY_PATH")
    return Finding(TORCH, "fail", what, f"{said}. Its installation is damaged, or mixes versions.", install(facts))


def _for_cpus(facts: Facts) -> Finding:
    version = facts.torch.version
    if not has_gpu(facts):
        return Finding(TORCH, "ok", f"{version}, a build for CPUs: enough where there is no GPU")
    what = f"torch {version} has no CUDA (torch.version.cuda is None), and there is a GPU"
    why = (
        "Transformer Engine's build reads that version too, and ends in `expected string or bytes-like object, got "
        "'NoneType'` or `InvalidVersion: Invalid version: None`."
    )
    if facts.system.machine == "aarch64" and not _later_than_on_arm(version):
        why += " On ARM64 the package index has torch with CUDA from 2.11 on."
    return Finding(TORCH, "fail", what, why, install(facts))


def _later_than_on_arm(version: str | None) -> bool:
    try:
        return Version(Version(version or "0").base_version) >= FIRST_ON_ARM
    except InvalidVersion:
        return False


def _cannot_use(facts: Facts) -> Finding:
    said = facts.torch.unavailable or "CUDA gives no reason"
    if "802" in said or "not yet initialized" in said:
        why = "GPUs behind an NVSwitch need NVIDIA's fabric manager, in the driver's version."
        return Finding(
            TORCH, "fail", "CUDA does not start", f"{said}. {why}", "sudo systemctl start nvidia-fabricmanager"
        )
    why = "The driver and torch do not work together. A restart loads the driver again."
    what = f"torch {facts.torch.version} cannot use the GPU"
    return Finding(TORCH, "fail", what, f"{said}. {why}", "sudo reboot")


def _architectures(facts: Facts) -> Iterator[Finding]:
    """Say whether torch has kernels for the GPU, or PTX of an earlier one, which the driver compiles."""
    found, known = capability(facts), facts.torch.architectures
    if found is None or not known:
        return
    for name in known:
        kind, _, number = name.rstrip("af").partition("_")
        version = divmod(int(number), 10) if number.isdecimal() and len(number) < 5 else None
        if version and version <= found and (kind == "compute" or version[0] == found[0]):
            return
    what = f"this torch has no kernels for compute capability {facts.torch.capability}: {', '.join(known)}"
    yield Finding(TORCH, "fail", what, "It was built for other GPUs.", install(facts))


RULES = (torch,)

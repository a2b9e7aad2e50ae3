"""Rules on Transformer Engine: what compiles it, whether it loads, which cuDNN it takes, its variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from gpt2_fp8.diagnose.facts import Facts
from gpt2_fp8.diagnose.finding import Finding, Status
from gpt2_fp8.diagnose.rules_gpu import may_fp8
from gpt2_fp8.diagnose.rules_torch import fits, library, without_folders

TE, CUDNN, BUILD, VARIABLES = "Transformer Engine", "cuDNN", "to compile Transformer Engine", "variables"
PREPARE = 'pip install "setuptools>=77" wheel packaging ninja pybind11'
INSTALL = f'{PREPARE} && pip install --no-build-isolation -e ".[fp8]"'
COMPILER = "sudo apt-get install build-essential"
_PARTS = "transformer-engine transformer-engine-torch transformer-engine-cu12 transformer-engine-cu13"
ANEW = f'pip uninstall -y {_PARTS} && pip install --no-build-isolation --no-cache-dir -e ".[fp8]"'
AGAIN = "Then run this program again."


def _broken(facts: Facts) -> bool:
    found = library(facts, "transformer-engine")
    return found.version is None or found.error is not None


def _severity(facts: Facts) -> Status:
    """Return "warn" if FP8 works without Transformer Engine."""
    return "warn" if any(run.works for run in facts.runs.values() if run.backend == "torchao") else "fail"


def _cuda(facts: Facts) -> str:
    """Return the CUDA that is to be built for: torch's, or the newest that the driver can run."""
    return facts.torch.cuda or facts.driver.cuda or "13.0"


def _major(version: str) -> str:
    return version.partition(".")[0]


def build(facts: Facts) -> Iterator[Finding]:
    """Say what is missing to compile Transformer Engine, where it is to be compiled."""
    if not (may_fp8(facts) and _broken(facts)):
        return
    status, cuda = _severity(facts), _cuda(facts)
    if facts.build.cxx is None:
        yield Finding(BUILD, status, "there is no C++ compiler", AGAIN, COMPILER)
    if facts.build.cuda_runtime_h is None:
        what = "CUDA's headers are not found (cuda_runtime.h)"
        package = f"cuda-toolkit-{cuda.replace('.', '-')}"
        why = "The package is in NVIDIA's own repository. If they are elsewhere: export CUDA_HOME=FOLDER"
        yield Finding(BUILD, status, what, why, f"sudo apt-get install {package}")
    elif facts.build.nvcc_version and facts.torch.cuda and _major(facts.build.nvcc_version) != _major(facts.torch.cuda):
        what = f"the CUDA toolkit is {facts.build.nvcc_version}, and torch has CUDA {facts.torch.cuda}"
        why = "Headers of another CUDA end in errors while it is compiled, or in undefined symbols."
        yield Finding(BUILD, status, what, why, f"export CUDA_HOME=/usr/local/cuda-{facts.torch.cuda}")
    if facts.build.cudnn_h is None:
        what = "cuDNN's headers are not found (cudnn.h)"
        why = f"If they are elsewhere: export CUDNN_PATH=FOLDER. {AGAIN}"
        yield Finding(BUILD, status, what, why, f"pip install nvidia-cudnn-cu{_major(cuda)}")
    elif "/nvidia/cudnn/" in facts.build.cudnn_h and not {"CUDNN_HOME", "CUDNN_PATH"} & facts.environment.keys():
        home = PurePosixPath(facts.build.cudnn_h).parents[1]
        why = "The compiler does not look into a Python package: fatal error: cudnn.h: No such file or directory."
        what = "cuDNN's headers are only in its Python package"
        yield Finding(BUILD, status, what, why, f"export CUDNN_PATH={home}")
    framework = facts.environment.get("NVTE_FRAMEWORK", "pytorch").lower()
    if not {"pytorch", "all"} & set(framework.split(",")):
        what = f"NVTE_FRAMEWORK={framework} leaves out the part for PyTorch"
        yield Finding(BUILD, status, what, None, "unset NVTE_FRAMEWORK")


def transformer_engine(facts: Facts) -> Iterator[Finding]:
    """Say whether Transformer Engine loads, and what mends it."""
    if not may_fp8(facts):
        return
    found = library(facts, "transformer-engine")
    if found.version is None:
        why = "torchao computes FP8 instead, slower. " if _severity(facts) == "warn" else ""
        why += (
            "It is compiled against your torch. Without --no-build-isolation, pip compiles it against a torch of its "
            "own choice. On ARM64 that may be one without CUDA: got 'NoneType'."
        )
        yield Finding(TE, _severity(facts), "Transformer Engine is not installed", why, INSTALL)
    elif found.error:
        why, remedy = _mended(facts, found.error)
        what = f"Transformer Engine {found.version} does not load"
        yield Finding(TE, _severity(facts), what, f"{without_folders(found.error)}. {why}", remedy)
    elif not fits(found):
        what = f"Transformer Engine {found.version} is not one of {found.wanted}, with which this was tested"
        yield Finding(TE, "warn", what, "It loads, and may differ in what it computes.", INSTALL)
    else:
        yield Finding(TE, "ok", f"{found.version} loads")


def _mended(facts: Facts, error: str) -> tuple[str, str]:
    """Return where an error of loading comes from, and the command that mends it."""
    version = library(facts, "transformer-engine").version
    major = _major(_cuda(facts))
    if "undefined symbol" in error and "cublas" in error.lower():
        package = f"nvidia-cublas-cu{major}" if major == "12" else "nvidia-cublas"
        return "The cuBLAS that is loaded is older than the one it was built with.", f"pip install -U {package}"
    if "undefined symbol" in error:
        why = "It was compiled against another torch. pip keeps what it compiled, hence --no-cache-dir."
        again = "pip install --no-build-isolation --no-cache-dir --no-deps --force-reinstall"
        return why, f'{again} "transformer-engine-torch=={version}"'
    if "libcudnn" in error:
        return "It finds no cuDNN.", _own_first(facts) or f"pip install nvidia-cudnn-cu{major}"
    if "cannot open shared object" in error:
        return f"It was built for another CUDA than torch's {facts.torch.cuda}.", ANEW
    return "Its parts do not fit each other.", ANEW


def cudnn(facts: Facts) -> Iterator[Finding]:
    """Say which cuDNN is loaded, and whether another one stands before torch's own."""
    found = facts.cudnn
    if not may_fp8(facts):
        return
    if found.error:
        loaded = f"Loaded: {', '.join(found.loaded)}. " if found.loaded else ""
        why = f"{loaded}Another cuDNN than torch's own was loaded first, by Transformer Engine or LD_LIBRARY_PATH."
        remedy = _own_first(facts) or "unset LD_LIBRARY_PATH CUDNN_HOME CUDNN_PATH"
        yield Finding(CUDNN, "fail", "torch refuses the cuDNN that is loaded", f"{found.error} {why}", remedy)
    elif found.first and found.own and _folder(found.first) != _folder(found.own) and not _same(facts):
        what = f"two cuDNNs: {found.first} ({found.first_version or 'version not known'}) stands before torch's own"
        why = f"torch was built with {found.own_version}. It may refuse another version."
        yield Finding(CUDNN, "warn", what, why, _own_first(facts))
    elif found.version:
        yield Finding(CUDNN, "ok", found.version)


def _same(facts: Facts) -> bool:
    """Return whether the first cuDNN has the version of torch's own, whose package adds a fourth number."""
    first, own = facts.cudnn.first_version, facts.cudnn.own_version
    return bool(first and own and own.split(".")[:3] == first.split(".")[:3])


def _folder(library: str) -> PurePosixPath:
    return PurePosixPath(library).parent


def _own_first(facts: Facts) -> str | None:
    if facts.cudnn.own is None:
        return None
    own = _folder(facts.cudnn.own)
    return f"export CUDNN_HOME={own.parent} LD_LIBRARY_PATH={own}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"


def variables(facts: Facts) -> Iterator[Finding]:
    """Say which variables contradict each other or cost speed."""
    if not may_fp8(facts):
        return
    off = [name for name in ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN") if facts.environment.get(name) == "0"]
    flash = any(library(facts, name).version for name in ("flash-attn", "flash-attn-4"))
    if len(off) == 2 or (off == ["NVTE_FUSED_ATTN"] and not flash):
        what = " and ".join(f"{name}=0" for name in off)
        none = facts.environment.get("NVTE_UNFUSED_ATTN") == "0"
        why = "No kernel of attention is left." if none else "What is left is attention by its formula, slow and large."
        if len(off) == 1:
            why = f"FlashAttention is not installed. {why}"
        remedy = f"unset {' '.join(off)}"
        yield Finding(VARIABLES, "fail" if none else "warn", f"{what}: no fused attention", why, remedy)
    if facts.environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0":
        what = "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
        why = "Transformer Engine then takes slower kernels of attention. trainer.deterministic=true is a run's own."
        yield Finding(VARIABLES, "warn", what, why, "unset NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    if facts.environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        why = "The host then waits for each kernel: for debugging alone."
        yield Finding(VARIABLES, "warn", "CUDA_LAUNCH_BLOCKING=1", why, "unset CUDA_LAUNCH_BLOCKING")


RULES = (build, transformer_engine, cudnn, variables)

"""Rules on what surrounds FP8: faster kernels, the compiler that Triton needs, caches, memory, disk."""

from __future__ import annotations

from collections.abc import Iterator

from gpt2_fp8.config import fp8_units
from gpt2_fp8.diagnose.facts import Facts, Place
from gpt2_fp8.diagnose.finding import Finding
from gpt2_fp8.diagnose.rules_gpu import capability, has_gpu, may_fp8
from gpt2_fp8.diagnose.rules_te import COMPILER
from gpt2_fp8.diagnose.rules_torch import in_order, library

FASTER, KERNELS, CACHES, HOST = "faster kernels", "to compile kernels", "caches", "host"
GIB = 2**30
CACHES_OF = {"Triton's cache": "TRITON_CACHE_DIR", "torch.compile's cache": "TORCHINDUCTOR_CACHE_DIR"}
LEAST_CACHE = 100 * 2**20  # bytes; a threshold, like the next ones, and not a measurement
ROOMY_CACHE = GIB
LEAST_OUTPUTS = 5 * GIB  # two checkpoints of GPT-2 124M take 3
LEAST_MEMORY = 8 * GIB
LEAST_SHARED = GIB  # Docker gives 64 MiB


def faster(facts: Facts) -> Iterator[Finding]:
    """Say which kernels would make the fused layers faster."""
    found = capability(facts)
    loads = library(facts, "transformer-engine")
    if not found or found[0] != fp8_units.HOPPER or loads.version is None or loads.error:
        return
    yield _optional(facts, "flash-attn-4", "attention's backward", 'pip install -e ".[fa4]"')
    wanted = in_order(library(facts, "cuda-core").wanted)
    yield _optional(facts, "cuda-core", "the kernels in CUDA C++", f'pip install "cuda-core{wanted}"')


def _optional(facts: Facts, name: str, what: str, command: str) -> Finding:
    one = library(facts, name)
    if one.version is None:
        why = "Slower, and not wrong: other kernels do the same work."
        return Finding(FASTER, "warn", f"{name} is not installed: {what}", why, command)
    if one.error:
        return Finding(FASTER, "warn", f"{name} {one.version}: {one.error}", "Slower, and not wrong.", command)
    return Finding(FASTER, "ok", f"{name} {one.version}: {what}")


def torchao(facts: Facts) -> Iterator[Finding]:
    """Say whether torchao can compute FP8, where that matters: Transformer Engine cannot."""
    one, other = library(facts, "torchao"), library(facts, "transformer-engine")
    if not may_fp8(facts):
        return
    without = other.version is None or other.error
    if one.version and not one.error:
        yield Finding("torchao", "ok", f"{one.version}: FP8 without a compiler and headers")
    elif without:
        what = f"torchao {one.version} does not load: {one.error}" if one.error else "torchao is not installed"
        why = "The quickest way to FP8 here: nothing to compile. Transformer Engine is faster."
        yield Finding("torchao", "warn", what, why, 'pip install -e ".[torchao]"')


def compiler(facts: Facts) -> Iterator[Finding]:
    """Say whether Triton can compile: it needs a C compiler and Python's headers at the first step."""
    if not has_gpu(facts):
        return
    if facts.torch.cuda and library(facts, "triton").version is None:
        yield Finding(
            KERNELS,
            "fail",
            "Triton is not installed",
            "torch.compile and the fused layers need it.",
            "pip install triton",
        )
    if facts.build.cc is None:
        why = "Triton compiles a small C program at the first step, in bf16 too."
        yield Finding(KERNELS, "fail", "there is no C compiler", why, COMPILER)
    if facts.build.python_h is None:
        why = "Triton's first step ends in: fatal error: Python.h: No such file or directory."
        package = f"python{'.'.join(facts.system.python.split('.')[:2])}-dev"
        what = "Python's headers are not found (Python.h)"
        yield Finding(KERNELS, "fail", what, why, f"sudo apt-get install {package}")
    if facts.build.cc and facts.build.python_h:
        yield Finding(KERNELS, "ok", f"C compiler {facts.build.cc}, Python.h")


def caches(facts: Facts) -> Iterator[Finding]:
    """Say whether compiled kernels can be stored, and loaded again."""
    if not has_gpu(facts):
        return
    for name, variable in CACHES_OF.items():
        if name in facts.places:
            yield _cache(facts, name, facts.places[name], variable)


def _cache(facts: Facts, name: str, place: Place, variable: str) -> Finding:
    remedy = _elsewhere(facts, name, variable)
    what = f"{name} {place.path}"
    if not place.writable:
        return Finding(CACHES, "fail", f"{what} cannot be written", "Compiled kernels go there.", remedy)
    if not place.executable:
        why = "Compiled kernels are libraries, and a disk mounted noexec does not let them be loaded."
        return Finding(CACHES, "fail", f"{what} is on a disk mounted noexec", why, remedy)
    if place.free is None:
        return Finding(CACHES, "ok", what)
    what = f"{what}: {size(place.free)} free"
    if place.free < LEAST_CACHE:
        return Finding(CACHES, "fail", what, "The kernels of a model do not fit.", remedy)
    if place.free < ROOMY_CACHE:
        return Finding(CACHES, "warn", what, "The kernels of a few models fit.", remedy)
    return Finding(CACHES, "ok", what)


def _elsewhere(facts: Facts, name: str, variable: str) -> str:
    """Return the command that moves a cache to the roomiest place that can hold it."""
    others = [
        place
        for other, place in facts.places.items()
        if other not in CACHES_OF and place.writable and place.executable and (place.free or 0) >= ROOMY_CACHE
    ]
    roomiest = max(others, key=lambda place: place.free or 0, default=None)
    folder = variable.partition("_")[0].lower()
    return f"export {variable}={roomiest.path}/{folder}" if roomiest else f"export {variable}=FOLDER"


def host(facts: Facts) -> Iterator[Finding]:
    """Say whether there are memory, shared memory and room for checkpoints."""
    system = facts.system
    if system.memory_left is not None:
        what = f"{size(system.memory_left)} of memory left"
        if system.memory_left < LEAST_MEMORY:
            shell = (system.memory_limit or "").startswith("ulimit")
            remedy = f"{system.memory_limit} unlimited" if shell else None
            why = f"The limit is that of {system.memory_limit}. Compiling or saving may end a run for want of memory."
            yield Finding(HOST, "warn", what, why, remedy)
        else:
            yield Finding(HOST, "ok", f"{what}, {system.cpus} CPU cores")
    if system.shared_memory is not None and system.shared_memory < LEAST_SHARED and system.container:
        why = "It is Docker's default. Several GPUs exchange data there (NCCL), and end in No space left on device."
        what = f"/dev/shm of this container has {size(system.shared_memory)}"
        yield Finding(HOST, "warn", what, why, "docker run --gpus all --ipc=host IMAGE")
    if "outputs" in facts.places:
        yield _outputs(facts.places["outputs"])


def _outputs(place: Place) -> Finding:
    if not place.writable:
        return Finding(HOST, "warn", f"{place.path} cannot be written", "Runs go there.", "cd FOLDER_OF_YOURS")
    if place.free is not None and place.free < LEAST_OUTPUTS:
        what = f"{place.path}: {size(place.free)} free"
        why = "A checkpoint of GPT-2 124M has 1.4 GiB, and a run keeps two."
        return Finding(HOST, "warn", what, why, "cd FOLDER_OF_YOURS")
    free = f": {size(place.free)} free" if place.free is not None else ""
    return Finding(HOST, "ok", f"runs go to {place.path}{free}")


def size(number: int) -> str:
    """Return bytes as people read them: 64 MiB, 23.5 GiB, 140 GiB."""
    if number < GIB:
        return f"{number / 2**20:.0f} MiB"
    return f"{number / GIB:.1f} GiB" if number < 100 * GIB else f"{number / GIB:.0f} GiB"


RULES = (faster, torchao, compiler, caches, host)

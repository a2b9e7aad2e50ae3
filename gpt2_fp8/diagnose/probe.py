"""Collects all facts of this machine. Nothing that it starts can end it, or keep it waiting without end."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpt2_fp8 import __version__
from gpt2_fp8.diagnose import child, probe_build, probe_gpu, probe_host
from gpt2_fp8.diagnose.facts import Cudnn, Facts, Library, Run, Torch
from gpt2_fp8.diagnose.offers import Offer
from gpt2_fp8.measure import subprocesses

SECONDS = 180.0  # for all parts of a child: imports from a network's disk take long
CHILD = "gpt2_fp8.diagnose.child"
# The package, and the part of the child that tries it.
_TRIED = {
    "transformer-engine": "transformer_engine",
    "torchao": "torchao",
    "flash-attn-4": "flash_attn",
    "cuda-core": "cuda_core",
}


def collect(offers: Sequence[Offer], say: Callable[[str], None]) -> Facts:
    """Return the facts of this machine, without times of steps.

    `offers`: the settings that the backends are asked about. `say` is told what is looked at, since it takes seconds.
    """
    say("the GPUs and their driver")
    driver, gpus = probe_gpu.record()
    say("compilers, headers, packages, disks")
    libraries = probe_host.libraries()
    build, places, system = probe_build.build(), probe_host.places(), probe_host.system()
    say("torch, Transformer Engine and what else FP8 stands on, in a process of their own")
    configs = {offer.name: asdict(offer.config) for offer in offers if offer.config is not None}
    answers, failed = ask(configs, libraries)
    return Facts(
        gpt2_fp8=__version__,
        system=system,
        driver=driver,
        gpus=gpus,
        torch=_torch(answers, failed),
        cudnn=_cudnn(answers.get("cudnn") or {}),
        libraries=_libraries(libraries, answers, failed),
        build=build,
        environment=probe_host.environment(),
        places=places,
        runs=_runs(offers, answers.get("runs") or {}, failed),
        steps={},
        failed=failed,
    )


def ask(
    configs: dict[str, Any],
    libraries: dict[str, Library],
    parts: Sequence[str] = (*child.PARTS, "runs"),
    module: str = CHILD,
    seconds: float = SECONDS,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the answers of the child's parts, and why the others have none.

    If the child crashes in a part, another one is started for the parts after it. A package that is not installed is
    not tried.
    """
    absent = {part for name, part in _TRIED.items() if name in libraries and libraries[name].version is None}
    left = [part for part in parts if part not in absent]
    answers: dict[str, Any] = {}
    failed: dict[str, str] = {}
    while left:
        ended = subprocesses.run(module, {"parts": left, "runs": configs}, seconds)
        new = ended.answer or {}
        for part, answer in new.items():
            if isinstance(answer, dict) and set(answer) == {"failed"}:
                failed[part] = answer["failed"]
            else:
                answers[part] = answer
        left = left[len(new) :]
        if left:
            failed[left[0]] = ended.message or "its process ended in the middle of it"
            if left[0] == "torch":  # all others import it too
                return answers, failed
            left = left[1:]
    return answers, failed


def _torch(answers: dict[str, Any], failed: dict[str, str]) -> Torch:
    if "torch" in answers:
        return Torch(**answers["torch"])
    return child.no_torch(failed.get("torch", "it was not asked"))


def _cudnn(answer: dict[str, Any]) -> Cudnn:
    """Add to the child's answer which cuDNN the variables put first, and torch's own."""
    own = next((str(path) for path in probe_build.wheels("cudnn/lib/libcudnn.so.*")), None)
    first = next((str(path) for path in probe_build.preferred("libcudnn.so.*")), None)
    return Cudnn(
        error=answer.get("error"),
        version=answer.get("version"),
        loaded=answer.get("loaded") or [],
        first=first,
        first_version=version_in(first) if first else None,
        own=own,
        own_version=probe_build.version_of_wheel("nvidia-cudnn-cu"),
    )


def version_in(library: str) -> str | None:
    """Return the version that a library's file name ends in, after links: libcudnn.so.9.14.0 has 9.14.0."""
    found = re.search(r"\.so\.(\d+\.\d+[\d.]*)$", str(Path(library).resolve()))
    return found[1] if found else None


def _libraries(libraries: dict[str, Library], answers: dict[str, Any], failed: dict[str, str]) -> dict[str, Library]:
    def error(name: str) -> str | None:
        part = _TRIED.get(name, "")
        return failed.get(part) or answers.get(part)

    return {name: replace(library, error=error(name)) for name, library in libraries.items()}


def _runs(offers: Sequence[Offer], answers: dict[str, str | None], failed: dict[str, str]) -> dict[str, Run]:
    found = {}
    for offer in offers:
        unknown = failed.get("runs", "torch does not import")
        reason = offer.refusal if offer.config is None else answers.get(offer.name, unknown)
        found[offer.name] = Run(
            precision=offer.precision,
            recipe=offer.recipe,
            backend=offer.backend,
            works=reason is None,
            offered=offer.config is not None,
            reason=reason,
        )
    return found

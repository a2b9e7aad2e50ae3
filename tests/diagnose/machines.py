"""Recorded machines, `machines/NAME.json`, each a report that `--json` prints, with the facts alone.

What a machine can run is asked of the real backends, with torch's, Transformer Engine's and torchao's answers replaced
by what the facts say. `python -m tests.diagnose.machines` writes it into every file again, after a backend's words have
changed.
"""

import builtins
import functools
import importlib.machinery
import json
import sys
import types
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import torch

from gpt2_fp8.compat import torchao
from gpt2_fp8.config.fp8_units import parsed
from gpt2_fp8.diagnose import child, offers, probe
from gpt2_fp8.diagnose.facts import FORMAT, Facts, from_json, to_json

FOLDER = Path(__file__).parent / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
TE = "transformer_engine"


def file(name):
    return FOLDER / f"{name}.json"


def facts(name) -> Facts:
    return from_json(json.loads(file(name).read_text()), name)


def write(name, recorded):
    """Write a machine's file, a run a line."""
    text = json.dumps({"format": FORMAT, "facts": to_json(recorded) | {"runs": "RUNS"}}, indent=1)
    runs = ",\n".join(f"   {json.dumps(run)}: {json.dumps(asdict(how))}" for run, how in recorded.runs.items())
    file(name).write_text(text.replace('"RUNS"', "{\n" + runs + "\n  }") + "\n")


class _Broken:
    """Finds `transformer_engine.pytorch`, and fails as the machine's does."""

    def __init__(self, error):
        kind, _, text = error.partition(": ")
        self.error = getattr(builtins, kind)(text)

    def find_spec(self, name, path=None, target=None):
        if name == f"{TE}.pytorch":
            raise self.error


def _engine(recorded):
    """Transformer Engine's answers by compute capability and CUDA, as version 2.20 has them."""
    found = parsed(recorded.torch.capability) or (0, 0)
    cuda = tuple(map(int, (recorded.torch.cuda or "0.0").split(".")))
    answers = {
        "is_fp8_available": (found >= (8, 9), "Device compute capability 8.9 or higher required for FP8 execution."),
        "is_fp8_block_scaling_available": (
            found >= (9, 0) and cuda >= (12, 9),
            "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9.",
        ),
        "is_mxfp8_available": (
            (10, 0) <= found < (12, 0),
            "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."
            if found >= (12, 0)
            else "Device compute capability 10.0 or higher required for MXFP8 execution.",
        ),
    }
    module = types.ModuleType(f"{TE}.pytorch")
    for name, (able, reason) in answers.items():
        setattr(module, name, lambda return_reason, able=able, reason=reason: (able, "" if able else reason))
    return module


@contextmanager
def standing_in(recorded):
    """Torch, Transformer Engine and torchao answer as on the machine."""
    engine, ao = recorded.libraries["transformer-engine"], recorded.libraries["torchao"]
    modules = {}
    if engine.version:
        package = types.ModuleType(TE)
        package.__spec__ = importlib.machinery.ModuleSpec(TE, None, is_package=True)
        package.__path__ = []
        modules[TE] = package
        if not engine.error:
            modules[f"{TE}.pytorch"] = package.pytorch = _engine(recorded)
    finders = [_Broken(engine.error), *sys.meta_path] if engine.error else sys.meta_path
    no_torchao = torchao.NOT_INSTALLED if ao.version is None else ao.error
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(sys, "meta_path", finders),
        mock.patch.object(torch.version, "cuda", recorded.torch.cuda),
        mock.patch.object(torch.cuda, "is_available", return_value=recorded.torch.available),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=parsed(recorded.torch.capability)),
        mock.patch.object(torch.cuda, "get_device_name", return_value=recorded.torch.gpu),
        mock.patch.object(torchao, "why_not", return_value=no_torchao),
    ):
        yield


@functools.cache
def offered():
    return offers.offers()


def runs(recorded):
    """What the real backends say on the machine, as `probe.collect` records it."""
    asked = offered()
    if recorded.torch.error or "runs" in recorded.failed:
        return probe._runs(asked, {}, recorded.failed)
    with standing_in(recorded):
        return probe._runs(asked, child.runs({o.name: asdict(o.config) for o in asked if o.config}), {})


if __name__ == "__main__":
    for each in NAMES:
        write(each, replace(facts(each), runs=runs(facts(each))))

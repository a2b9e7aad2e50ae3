"""The facts of a machine: what the driver says, and a child that crashes."""

import json

from gpt2_fp8.measure import machine
from gpt2_fp8.measure.case import Ended


def nvidia_smi(monkeypatch, listed, header="", error=None):
    monkeypatch.setattr(machine, "_output", lambda _, *flags: (listed, error) if flags else (header, error))


def test_what_the_driver_says(monkeypatch):
    listed = "NVIDIA H200, 9.0, 580.95.05\nNVIDIA GB10, [N/A], 580.95.05\n"
    nvidia_smi(monkeypatch, listed, "| KMD Version: 580.95.05  CUDA UMD Version: 13.0 |")
    host = machine._host()
    assert host["gpus"] == [("NVIDIA H200", "9.0"), ("NVIDIA GB10", "[N/A]")]
    assert (host["driver"], host["driver_cuda"], host["driver_error"]) == ("580.95.05", "13.0", None)


def test_a_part_that_crashes_leaves_the_others(monkeypatch):
    asked = []

    def run(module, parts, seconds):
        asked.append(list(parts))
        if "transformer-engine" in parts:
            return Ended(status="failed", answer={"torch": {"answer": {}}}, message="killed by SIGSEGV")
        return Ended(status="ok", answer={part: {"answer": None} for part in parts})

    monkeypatch.setattr(machine, "run_child", run)
    answers, errors = machine.ask(["torch", "transformer-engine", "cudnn"])
    assert asked == [["torch", "transformer-engine", "cudnn"], ["cudnn"]]
    assert set(answers) == {"torch", "cudnn"}
    assert errors == {"transformer-engine": "killed by SIGSEGV"}


def test_a_part_that_raises_is_answered_with_its_error(tmp_path, monkeypatch):
    def broken():
        raise OSError("libcublas.so.12:\n cannot open shared object file")

    monkeypatch.setitem(machine.ANSWERS, "transformer-engine", broken)
    monkeypatch.setitem(machine.ANSWERS, "torchao", lambda: "it is too old")
    machine.answer_parts(["transformer-engine", "torchao"], tmp_path / "answer")
    said = json.loads((tmp_path / "answer").read_text())
    assert said["transformer-engine"] == {"error": "OSError: libcublas.so.12: cannot open shared object file"}
    assert said["torchao"] == {"answer": "it is too old"}


def test_only_variables_that_change_what_computes_are_recorded(monkeypatch):
    nvidia_smi(monkeypatch, "")
    for name in ("CUDA_VISIBLE_DEVICES", "NVTE_FUSED_ATTN", "LD_LIBRARY_PATH", "MY_SECRET"):
        monkeypatch.setenv(name, "x")
    recorded = machine._host()["environment"]
    assert {"CUDA_VISIBLE_DEVICES", "NVTE_FUSED_ATTN", "LD_LIBRARY_PATH"} <= recorded.keys()
    assert "MY_SECRET" not in recorded

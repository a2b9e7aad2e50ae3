"""The environment check as a program."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from gpt2_fp8 import doctor
from tests.doctor.machines import H200, STEPS, cpu


def command(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-m", "gpt2_fp8.doctor", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=300, env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_here(tmp_path):
    """This machine, in a new process: a report as JSON, and the exit code of no FP8."""
    done = command("--json", cwd=tmp_path)
    assert done.returncode == doctor.NO_FP8, done.stderr
    report = json.loads(done.stdout)
    assert (report["fp8_works"], report["facts"]["steps"]) == (False, {})
    assert report["facts"]["libraries"]["torch"] == torch.__version__
    assert report["facts"]["runs"]["delayed fused"]
    assert report["facts"]["errors"] == {}
    assert "looking at" in done.stderr


def test_a_torch_that_crashes_is_a_fact(tmp_path):
    (tmp_path / "broken/torch").mkdir(parents=True)
    (tmp_path / "broken/torch/__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    done = command("--quick", cwd=tmp_path, PYTHONPATH=f"{tmp_path / 'broken'}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == doctor.NO_FP8
    assert "Traceback" not in done.stdout + done.stderr
    assert "killed by SIGSEGV" in " ".join(done.stdout.split())


def measuring(monkeypatch, facts, steps=STEPS):
    """Have the facts of a machine collected, and note whether steps are measured."""
    asked = []
    monkeypatch.setattr(doctor.machine, "collect", lambda say: facts)
    monkeypatch.setattr(doctor.machine, "measure_steps", lambda say: asked.append(1) or steps)
    return asked


def test_steps_are_measured_where_fp8_works(monkeypatch, capsys):
    asked = measuring(monkeypatch, H200)
    assert (doctor.main([]), asked) == (0, [1])
    out = capsys.readouterr().out
    assert out.startswith("FP8 works here: the fused layers, 1.72 x bf16")
    assert max(map(len, out.splitlines())) <= 80
    assert (doctor.main(["--quick"]), asked) == (0, [1])
    measuring(monkeypatch, cpu())
    assert (doctor.main([]), asked) == (doctor.NO_FP8, [1])


def test_a_step_that_fails_denies_fp8(monkeypatch, capsys):
    measuring(monkeypatch, H200, {"fp8_hybrid": replace(STEPS["fp8_hybrid"], problem="illegal memory access")})
    assert doctor.main([]) == doctor.NO_FP8
    assert "illegal memory access" in capsys.readouterr().out


def test_stopped_by_the_keyboard(tmp_path):
    """SIGINT while torch is imported in the child, which ends too."""
    child = subprocess.Popen(
        [sys.executable, "-m", "gpt2_fp8.doctor"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert child.stderr
    for line in child.stderr:
        if "in a process of their own" in line:
            break
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, "")
    assert "Traceback" not in err

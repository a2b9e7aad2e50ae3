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
from gpt2_fp8.diagnose import facts as recorded
from tests.diagnose.machines import facts, file


def command(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-m", "gpt2_fp8.doctor", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=300, env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_here(tmp_path):
    """This machine, in a new process: a report that can be read, and the exit code of no FP8."""
    done = command("--json", cwd=tmp_path)
    assert done.returncode == doctor.NO_FP8, done.stderr
    report = json.loads(done.stdout)
    assert (report["format"], report["fp8_works"]) == (recorded.FORMAT, False)
    assert report["facts"]["torch"]["version"] == torch.__version__
    assert report["facts"]["steps"] == {}
    assert "looking at" in done.stderr
    (tmp_path / "report.json").write_text(done.stdout)
    text = command("--facts", "report.json", cwd=tmp_path)
    assert text.returncode == doctor.NO_FP8
    assert text.stdout.startswith(report["verdict"])
    assert text.stderr == ""


BROKEN = {
    "raises": ("raise ImportError('/x/libtorch.so: undefined symbol: foo')", "ImportError: libtorch.so: undefined"),
    "crashes": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_torch_that_breaks_is_a_fact(how, tmp_path):
    program, told = BROKEN[how]
    (tmp_path / "broken/torch").mkdir(parents=True)
    (tmp_path / "broken/torch/__init__.py").write_text(program)
    done = command("--quick", cwd=tmp_path, PYTHONPATH=str(tmp_path / "broken"))
    assert done.returncode == doctor.NO_FP8
    assert "Traceback" not in done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "torch does not import" in text
    assert told in text


def test_a_temporary_folder_that_cannot_be_used_is_told(tmp_path, monkeypatch, capsys):
    """What `measure.subprocesses` says then is known to the rule."""
    from gpt2_fp8.measure import subprocesses

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(subprocesses.Spool, "__init__", full)
    assert doctor.main(["--quick"]) == doctor.NO_FP8
    out = " ".join(capsys.readouterr().out.split())
    assert "torch could not be tried could not be run: [Errno 28] No space left on device" in out
    assert "fix: export TMPDIR=" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--facts", "missing.json"], "missing.json cannot be read: No such file or directory"),
        (["--facts", "."], ". cannot be read: it is a folder"),
        (["--facts", "empty.json"], "empty.json is no report: it is empty"),
        (["--facts", "text.json"], "text.json is no report"),
        (["--facts", "list.json"], "list.json is no report: it is not an object with the key facts"),
        (["--facts", "old.json"], "old.json has the format 'gpt2_fp8 doctor 0'"),
        (["--facts", "short.json"], "short.json: facts.torch is missing"),
        (["--facts", "more.json"], "more.json: there is no key facts.nonsense"),
        (["--facts", "wrong.json"], "wrong.json: facts.system.cpus=many"),
    ],
)
def test_a_file_that_is_no_report_is_refused(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    whole = {"format": recorded.FORMAT, "facts": recorded.to_json(facts("h100"))}
    (tmp_path / "empty.json").touch()
    (tmp_path / "text.json").write_text("FP8 works here")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "old.json").write_text(json.dumps(whole | {"format": "gpt2_fp8 doctor 0"}))
    short = {key: value for key, value in whole["facts"].items() if key != "torch"}
    (tmp_path / "short.json").write_text(json.dumps(whole | {"facts": short}))
    (tmp_path / "more.json").write_text(json.dumps(whole | {"facts": whole["facts"] | {"nonsense": 1}}))
    system = whole["facts"]["system"] | {"cpus": "many"}
    (tmp_path / "wrong.json").write_text(json.dumps(whole | {"facts": whole["facts"] | {"system": system}}))
    assert doctor.main(arguments) == 2
    error, fix = capsys.readouterr().err.rstrip("\n").split("\n")
    assert error.startswith(f"error: {told}")
    assert fix.startswith("  fix: ")


def test_a_strangers_report_has_no_effect_on_a_terminal(tmp_path, capsys):
    report = {"format": recorded.FORMAT, "facts": recorded.to_json(facts("h100"))}
    report["facts"]["gpus"]["0"]["name"] = "NVIDIA\x1b[2JH100"
    report["facts"]["environment"]["NVTE_FUSED_ATTN"] = "\x1b]0;x\x07"
    next(iter(report["facts"]["runs"].values()))["precision"] = "\x1b[2J"
    (tmp_path / "report.json").write_text(json.dumps(report))
    doctor.main(["--facts", str(tmp_path / "report.json")])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--nonsense"], ["word"], ["--facts"]])
def test_a_wrong_flag_is_the_users(arguments):
    assert doctor.main(arguments) == 2


def test_help_says_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "0 FP8 works here, 5 it cannot, 2 your input, 130 stopped" in text


def measuring(monkeypatch, name):
    """Have the facts of a machine collected, and note whether steps are measured."""
    times = facts("h200").steps
    asked = []
    monkeypatch.setattr(doctor.probe, "collect", lambda *_: replace(facts(name), steps={}))
    monkeypatch.setattr(doctor.steps, "measured", lambda runs, say: asked.append(list(runs)) or times)
    return asked


def test_steps_are_measured_where_fp8_works(monkeypatch, capsys):
    asked = measuring(monkeypatch, "h200")
    assert doctor.main([]) == 0
    assert asked == [["fp8_hybrid", "bf16"]]
    assert capsys.readouterr().out.startswith("FP8 works here: the fused layers, 1.72 x bf16")


@pytest.mark.parametrize(("arguments", "name"), [(["--quick"], "h200"), ([], "a100"), ([], "no_compiler")])
def test_else_none_is(arguments, name, monkeypatch):
    asked = measuring(monkeypatch, name)
    assert doctor.main(arguments) == (0 if name == "h200" else doctor.NO_FP8)
    assert asked == []


def test_a_step_that_fails_denies_fp8(monkeypatch, capsys):
    measuring(monkeypatch, "h200")
    monkeypatch.setattr(doctor.steps, "measured", lambda *_: facts("step_fails").steps)
    assert doctor.main([]) == doctor.NO_FP8
    assert "illegal memory access" in " ".join(capsys.readouterr().out.split())


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
    assert err.endswith("stopped\n")
    assert "Traceback" not in err


def test_a_report_is_read_in_a_new_process_too(tmp_path):
    done = command("--facts", str(file("gb10")), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("FP8 works here: torchao\n")

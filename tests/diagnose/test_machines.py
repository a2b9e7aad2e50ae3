"""What is said of each recorded machine, and that the commands that are to mend it exist."""

import copy
import json
import re
import shlex
import tomllib
from dataclasses import replace
from typing import NamedTuple

import pytest

from gpt2_fp8 import doctor
from gpt2_fp8.compose import preflight
from gpt2_fp8.config.fp8_units import parsed
from gpt2_fp8.diagnose import report, verdict
from gpt2_fp8.diagnose.facts import FORMAT, Facts, from_json, to_json
from tests.diagnose.machines import NAMES, facts, file, runs
from tests.forkserver import ROOT

FP8 = "pip install --no-build-isolation -e"


class Said(NamedTuple):
    """What is to be said: the first line, the command under it, and who else complains."""

    line: str
    remedy: str = ""
    others: str = ""  # subjects of the other findings that are not ok


TE, BUILD, NEEDS = "Transformer Engine", "to compile Transformer Engine", "to compile kernels"
MACHINES = {
    "h200": Said("works here: the fused layers, 1.72 x bf16 (74.1 ms a step beside 127.6)"),
    "h200_container": Said(
        "works here: the fused layers, 1.51 x bf16 (22.5 ms a step beside 33.9)", others="faster kernels"
    ),
    "h100": Said("works here: the fused layers"),
    "h200_two": Said("works here: the fused layers", others="GPU"),
    "l40s": Said("works here: Transformer Engine's layers"),
    "l40s_two": Said("works here: Transformer Engine's layers", others="links"),
    "b200": Said("works here: Transformer Engine's layers"),
    "gb10": Said("works here: torchao", others=TE),
    "gb10_older_torch": Said("torch 2.9.0 is not one of >=2.11,<2.14", 'pip install "torch>=2.11', f"{TE}|torchao"),
    "gb10_cpu_torch": Said("torch 2.10.0+cpu has no CUDA", "pip install --force-reinstall", f"{TE}|torchao"),
    "cpu_torch": Said("torch 2.13.0+cpu has no CUDA", "pip install --force-reinstall", f"{TE}|torchao"),
    "a100": Said("has compute capability 8.0, and FP8 needs 8.9", "python -m gpt2_fp8.run precision=bf16"),
    "a100_and_h100": Said("A100", "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1"),
    "undefined_symbol": Said("2.20.2 does not load", '--force-reinstall "transformer-engine-torch==2.20.2"', "torchao"),
    "older_cublas": Said("2.20.2 does not load", "pip install -U nvidia-cublas", "torchao"),
    "other_cuda": Said("2.20.2 does not load", "pip uninstall -y transformer-engine", "torchao"),
    "engine_kills": Said("2.20.2 does not load", "pip uninstall -y transformer-engine", "backends"),
    "not_installed": Said("Transformer Engine is not installed", FP8, "torchao"),
    "no_headers": Said(
        "there is no C++ compiler", "sudo apt-get install build-essential", f"{BUILD}|{BUILD}|{TE}|torchao"
    ),
    "cudnn_in_its_package": Said("only in its Python package", "export CUDNN_PATH=", f"{TE}|torchao"),
    "two_cudnns": Said("torch refuses the cuDNN that is loaded", "export CUDNN_HOME="),
    "cudnn_before_torchs": Said("works here: the fused layers", others="cuDNN"),
    "older_driver": Said("driver 550.54.15 runs CUDA up to 12.4", 'pip install --force-reinstall "torch==2.11.0"'),
    "driver_updated": Said("the driver on the disk is not the one", "sudo reboot", "torch"),
    "no_fabric_manager": Said("CUDA does not start", "sudo systemctl start nvidia-fabricmanager"),
    "hidden_gpu": Said("CUDA_VISIBLE_DEVICES='' hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
    "no_flash_attention": Said("works here: the fused layers", others="faster kernels|faster kernels"),
    "no_attention_left": Said("works here: the fused layers", others="variables|variables"),
    "small_shm": Said("works here: the fused layers", others="host"),
    "full_cache": Said("20 MiB free", "export TRITON_CACHE_DIR=/tmp/triton", "host"),
    "noexec_cache": Said("mounted noexec", "export TORCHINDUCTOR_CACHE_DIR=/home/me/gpt2_fp8/outputs/torchinductor"),
    "no_compiler": Said("there is no C compiler", "sudo apt-get install build-essential", NEEDS),
    "cpu_only": Said("there is no NVIDIA GPU", "python -m gpt2_fp8.run precision.backend=emulated"),
    "laptop": Said("there is no NVIDIA GPU", "python -m gpt2_fp8.run precision.backend=emulated", "host"),
    "no_driver": Said("and no driver for it", "sudo ubuntu-drivers install", "host"),
    "container_without_gpu": Said("this container was not given it", "docker run --gpus all"),
    "torch_kills": Said("torch does not import", "pip install --force-reinstall"),
    "torch_other_cuda": Said("torch does not import", "unset LD_LIBRARY_PATH"),
    "step_fails": Said("a step in fp8_hybrid gave no time", "python -m gpt2_fp8.bench"),
}


def judged(recorded: Facts):
    found = verdict.findings(recorded)
    return found, verdict.verdict(recorded, found)


def test_every_machine_is_expected():
    assert sorted(MACHINES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_matters_is_said_first(name, capsys):
    said = MACHINES[name]
    works = said.line.startswith("works here")
    assert doctor.main(["--facts", str(file(name))]) == (0 if works else doctor.NO_FP8)
    text = capsys.readouterr().out
    first, _, rest = text.partition("\n\n")
    assert said.line in " ".join(first.split())
    assert first.startswith("FP8 works here: " if works else "FP8 cannot run here: ")
    assert (said.remedy in first) if said.remedy else ("fix:" not in first)
    for line in rest.splitlines():  # a command and a file's name are never broken
        assert len(line) <= 80 or "fix: " in line or " " not in line.strip(), line


@pytest.mark.parametrize("name", NAMES)
def test_who_complains(name):
    said, (found, judgement) = MACHINES[name], judged(facts(name))
    bad = [finding for finding in found if finding.status != "ok"]
    if not judgement.works:
        cause = next(finding for finding in bad if finding.status == "fail")
        assert cause.remedy == judgement.remedy
        bad.remove(cause)
    assert sorted(finding.subject for finding in bad) == sorted(filter(None, said.others.split("|")))
    assert [finding for finding in found if finding.status == "ok" and finding.remedy] == []
    assert [finding for finding in found if finding.status == "fail" and not finding.remedy] == []


@pytest.mark.whole
@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_what_the_backends_say(name):
    """A file whose words are older than a backend's: python -m tests.diagnose.machines."""
    recorded = facts(name)
    assert runs(recorded) == recorded.runs


def test_the_table_tells_machines_apart():
    """The same settings: some run, some do not, by GPU and by what is installed."""

    def works(name):
        return {run for run, how in facts(name).runs.items() if how.works}

    assert "fp8_hybrid delayed fused" in works("h100") - works("l40s")
    assert "fp8_hybrid delayed te" in works("l40s") - works("gb10")
    assert "fp8_hybrid mxfp8 te" in works("b200") - works("h200")
    assert "fp8_hybrid rowwise torchao" in works("h200") - works("l40s")
    assert "fp8_hybrid current torchao" in works("gb10") - works("a100")
    assert "bf16 te" in works("a100") - works("cpu_torch")


@pytest.mark.parametrize("name", NAMES)
def test_a_report_can_be_read_again(name, tmp_path, capsys):
    code = doctor.main(["--facts", str(file(name)), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["fp8_works"] == (code == 0)
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert doctor.main(["--facts", str(tmp_path / "report.json"), "--json"]) == code
    assert json.loads(capsys.readouterr().out) == report


def remedies():
    return sorted({f.remedy for name in NAMES for f in judged(facts(name))[0] if f.remedy})


@pytest.mark.parametrize("remedy", remedies())
def test_every_command_exists(remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for command in remedy.split(" && "):
        words = shlex.split(command)
        start = tuple(words[:2]) if words[0] in ("pip", "sudo", "docker") else (words[0],)
        assert start in {
            ("pip", "install"), ("pip", "uninstall"), ("export",), ("unset",), ("cd",), ("nvidia-smi",), ("python",),
            ("sudo", "apt-get"), ("sudo", "reboot"), ("sudo", "systemctl"), ("sudo", "ubuntu-drivers"),
            ("docker", "run"),
        }  # fmt: skip
        if words[0] == "python" and words[2] == "gpt2_fp8.run":
            assert preflight(words[3:])
        elif words[0] == "python":
            from gpt2_fp8.compose import benchmark

            assert words[2] == "gpt2_fp8.bench"
            assert benchmark.preflight(words[3:], gpu=True)
        for extra in re.findall(r"\.\[(\w+)\]", command) if words[0] == "pip" else []:
            assert extra in project["optional-dependencies"]
    if '".[fp8]"' in remedy and "uninstall" not in remedy:
        assert all(line in (ROOT / "docs/fp8.md").read_text() for line in remedy.split(" && "))


VARIABLES = [name for name in NAMES if any(re.match("unset ", f.remedy or "") for f in judged(facts(name))[0])]


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_is_unset_is_no_longer_complained_of(name):
    recorded = facts(name)
    for finding in judged(recorded)[0]:
        if finding.remedy and finding.remedy.startswith("unset "):
            gone = finding.remedy.split()[1:]
            assert set(gone) & recorded.environment.keys()
            left = {key: value for key, value in recorded.environment.items() if key not in gone}
            mended = replace(recorded, environment=left)
            if finding.what == "torch does not import":  # it does, without the other libraries
                mended = replace(mended, torch=facts("h200").torch)
            assert finding not in judged(mended)[0]


def test_capabilities_are_numbers():
    assert [parsed(text) for text in ("9.0", "12.1", None, "", "9", "x.y")] == [(9, 0), (12, 1), None, None, None, None]


def texts(value, path=()):
    """Where a report's facts have a text, or null."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from texts(below, (*path, key))
    elif value is None or isinstance(value, str):
        yield path


@pytest.mark.whole
@pytest.mark.parametrize("text", ["", "nonsense", "9.0", "\x1b[2J" + "é" * 3000])
@pytest.mark.parametrize("name", ["h200_two", "older_cublas", "older_driver"])
def test_no_text_in_a_report_ends_in_an_error(name, text):
    """A report may be a stranger's. Its runs all have the same form, so one of them will do."""
    data = to_json(facts(name))
    data["runs"] = dict(list(data["runs"].items())[:1])
    places = list(texts(data))
    assert len(places) > 20
    for *above, last in places:
        changed = copy.deepcopy(data)
        at = changed
        for key in above:
            at = at[key]
        at[last] = text
        recorded = from_json({"format": FORMAT, "facts": changed}, name)
        found, said = judged(recorded)
        assert report.as_text(recorded, found, said).replace("\n", "").isprintable()


@pytest.mark.parametrize("name", NAMES)
def test_a_report_without_a_part_is_still_one(name):
    for part in ("gpus", "libraries", "places", "runs", "steps", "environment"):
        recorded = replace(facts(name), **{part: {}})
        found, said = judged(recorded)
        assert said.line.startswith("FP8 ")
        assert report.as_text(recorded, found, said)
        assert not (said.works and not recorded.runs and not recorded.steps)


def test_a_torch_for_other_gpus():
    recorded = facts("b200")
    torch = replace(recorded.torch, architectures=["sm_80", "sm_90a", "compute_120"])
    (found,) = (f for f in judged(replace(recorded, torch=torch))[0] if f.status == "fail")
    assert "no kernels for compute capability 10.0" in found.what
    for fine in (["sm_90", "compute_90"], ["sm_100"], ["sm_100a"]):
        recorded = replace(recorded, torch=replace(torch, architectures=fine))
        assert judged(recorded)[1].works


def test_nvidias_pre_release_of_torch_is_taken():
    recorded = facts("h200")
    own = replace(recorded.libraries["torch"], version="2.11.0a0+eb65b36914.nv26.02")
    assert all(f.status == "ok" for f in judged(replace(recorded, libraries=recorded.libraries | {"torch": own}))[0])


def test_a_step_in_bf16_that_fails_does_not_deny_fp8():
    recorded = facts("h200")
    bf16 = replace(recorded.steps["bf16"], milliseconds=None, tokens_per_second=None, problem="timed out: late")
    found, said = judged(replace(recorded, steps=recorded.steps | {"bf16": bf16}))
    assert (said.works, said.line) == (True, "FP8 works here: the fused layers")
    assert any("gave no time: timed out" in f.what for f in found if f.status == "warn")


def test_the_whole_attention_of_transformer_engine_switched_off():
    recorded = facts("no_attention_left")
    found, said = judged(replace(recorded, environment=recorded.environment | {"NVTE_UNFUSED_ATTN": "0"}))
    assert not said.works
    assert any("No kernel of attention is left" in (f.why or "") for f in found)


def test_attention_by_flash_alone_needs_it_installed():
    """NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=0, as many do."""
    recorded = replace(facts("l40s"), environment={"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0"})
    (found,) = (f for f in judged(recorded)[0] if f.status == "warn")
    assert found.remedy == "unset NVTE_FUSED_ATTN"
    flash = replace(recorded.libraries["flash-attn"], version="2.8.3")
    recorded = replace(recorded, libraries=recorded.libraries | {"flash-attn": flash})
    assert all(f.status == "ok" for f in judged(recorded)[0])


def test_a_framework_that_leaves_pytorch_out():
    recorded = replace(facts("not_installed"), environment={"NVTE_FRAMEWORK": "jax"})
    assert judged(recorded)[1].remedy == "unset NVTE_FRAMEWORK"
    recorded = replace(recorded, environment={"NVTE_FRAMEWORK": "jax,pytorch"})
    assert "pip install" in judged(recorded)[1].remedy


def test_a_torch_with_cuda_where_there_is_no_gpu():
    laptop = facts("laptop")
    torch = replace(facts("h100").torch, available=False, gpu=None, capability=None)
    found, said = judged(replace(laptop, torch=torch))
    assert said == judged(laptop)[1]
    assert [f.what for f in found if f.subject == "torch"] == ["2.11.0+cu130, CUDA 13.0, and no GPU for it"]


def test_a_toolkit_of_another_cuda_is_told_where_it_matters():
    recorded = facts("not_installed")
    older = replace(recorded.build, nvcc_version="12.4")
    assert judged(replace(recorded, build=older))[1].remedy == "export CUDA_HOME=/usr/local/cuda-13.0"
    assert judged(replace(facts("h100"), build=older))[1].works, "nothing is to be compiled there"


def test_a_shells_limit_is_lifted_by_its_own_command():
    recorded = facts("h200")
    system = replace(recorded.system, memory_left=2**31, memory_limit="ulimit -v")
    (found,) = (f for f in judged(replace(recorded, system=system))[0] if f.status == "warn")
    assert found.remedy == "ulimit -v unlimited"

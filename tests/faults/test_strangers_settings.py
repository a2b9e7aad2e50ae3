"""Faults 84 to 91: settings of strangers, and absurd ones of one's own. Each line is put to the program's own entry.

All lines run in one process, which says at the end that torch was never imported and that nothing was left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_fp8 import bench, run
from gpt2_fp8.compose import look_only, preflight, sweeps
from gpt2_fp8.compose.settings_folder import contents
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.runtime import last_say
from tests.config.numbers import LIMITS, RANGES
from tests.data.hub_runs import ROOT

GLOBAL = b"# @package _global_\n"
CANARY = "canary"
CODE = {  # what: (content of experiment/x.yaml, words of the cause)
    "a factory of Hydra's log": (
        b"hydra: {hydra_logging: {handlers: {x: {'()': os.mkdir, path: canary}}, root: {handlers: [x]}, version: 1}}",
        "sets hydra.hydra_logging",
    ),
    "env_set": (b"hydra: {job: {env_set: {LD_PRELOAD: x}}}", "sets hydra.job"),
    "a search path": (b"hydra: {searchpath: ['pkg://os']}", "sets hydra.searchpath"),
    "a launcher's setup": (b"hydra: {launcher: {setup: ['touch canary']}}", "sets hydra.launcher"),
    "a help text": (b"hydra: {help: {template: x}}", "sets hydra.help"),
    "a _target_": (b"optim: {_target_: os.mkdir, path: canary}", "holds a _target_ (optim._target_, line 2)"),
    "a _call_": (b"optim: {_call_: os.mkdir}", "holds a _call_"),
    "a factory": (b"optim: {'()': os.mkdir}", "holds a factory (optim.(), line 2)"),
    "an object": (b"run_name: ext://os.mkdir", "holds ext://os.mkdir (run_name, line 2)"),
    "a python tag": (b"seed: !!python/object/apply:os.mkdir [canary]", "holds the tag tag:yaml.org,2002:python/"),
    "the environment": (b"run_name: x${oc.env:SECRET}", "(run_name, line 2): SECRET of the environment is read"),
    "the environment, put together": (b"run_name: oc\nckpt_path: ${${run_name}.env:SECRET}", "(ckpt_path, line 3)"),
    "a resolver that reads texts": (b"run_name: \"${oc.decode:'$'}\"", "holds ${oc.decode:'$'}"),
    "Hydra's own values": (b"run_name: ${hydra.job.env_set.X}", "holds ${hydra.job.env_set.X}"),
    "Hydra's own values, from below": (b"data: {name: '${..hydra.job.name}'}", "holds ${..hydra.job.name}"),
    "a default that leads out": (b"defaults: [/../../other/x]", "holds the default /../../other/x"),
    "a hidden default": (b"defaults: [/.git/x]", "holds the default /.git/x"),
    "a default from the root": (b"defaults: [//tmp/x]", "holds the default //tmp/x"),
    "a default in another place": (b"defaults: [/optim@callbacks: tiny]", "holds the default /optim@callbacks"),
    "a merge at the top": (b"<<: {hydra: {job: {env_set: {LD_PRELOAD: x}}}}", "holds a merge (<<, line 2)"),
    "defaults merged": (b"<<: [{defaults: [override /hydra/job_logging: none]}]", "holds a merge (<<, line 2)"),
    "a handler's class": (b"logger: {x: {class: subprocess.Popen, args: [touch]}}", "a class (logger.x.class, line 2)"),
    "a dotted handler's class": (b"logger.x.class: subprocess.Popen", "a class (logger.x.class, line 2)"),
    "a header behind another blank": ("# \xa0@package hydra\nx: 1".encode(), "@package hydra"),
    "a header before another blank": ("#\u2003@package hydra.job\nx: 1".encode(), "@package hydra.job"),
    "a package in Hydra": (b"#@package _global_.hydra\nx: 1", "@package _global_.hydra"),
}
MODES = ["--help", "-h", "--hydra-help", "--cfg=job", "--cfg=all --resolve", "--info=all", "--info=config", "", "-m"]
UNREADABLE = {  # what: (content, words of the cause)
    "a byte-order mark": (b"\xef\xbb\xbf" + GLOBAL + b"seed: 3\n", "begins with a byte-order mark"),
    "UTF-16": ("seed: 3\n".encode("utf-16"), "is UTF-16"),
    "Latin-1": (GLOBAL + b"data: {name: caf\xe9}\n", "byte 36 is not UTF-8"),
    "NUL": (GLOBAL + b"run_name: a\0b\n", "line 2 has the control character '\\x00'"),
    "an escape": (GLOBAL + b"run_name: a\x1b[2Jb\n", "line 2 has the control character '\\x1b'"),
    "a tab": (GLOBAL + b"optim:\n\tlr: 1\n", "line 3 is indented with a tab"),
    "no YAML": (GLOBAL + b"seed: [1\n", "line 3: "),
    "a key twice": (GLOBAL + b"seed: 1\nseed: 2\n", "holds seed twice (seed, line 3)"),
    "a key twice, below": (GLOBAL + b"optim:\n  lr: 1\n  lr: 2\n", "holds lr twice (optim.lr, line 4)"),
    "two documents": (b"seed: 1\n---\nseed: 2\n", "a second document"),
    "an undefined alias": (b"seed: *a\n", "line 1: "),
    "a bomb": (
        b"a0: &a0 [x, x]\n"
        + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 30)),
        "more than 10,000 values",
    ),
    "an alias of itself": (b"a: &a [*a]\n", "more than "),
    "nesting": (b"a: " + b"[" * 30 + b"]" * 30, "groups within groups"),
    "nesting without end": (b"a: " + b"[" * 50_000, "nested too deeply"),
    "a large file": (GLOBAL + b"#" * contents.LARGEST + b"\n", "more than 65,536 bytes"),
    "a number of 5000 digits": (GLOBAL + b"seed: " + b"9" * 5000, "a number of 5,000 characters (seed, line 2)"),
    "a key that a terminal obeys": (GLOBAL + b'"\\e[2Jx": 1\n', "holds a key that is no name (\\x1b[2Jx, line 2)"),
    "a key of half a file": (GLOBAL + b"? " + b"x" * 30_000 + b"\n: 1\n", "holds a key that is no name (xxx"),
    "a binary": (GLOBAL + b"run_name: !!binary aGk=\n", "the tag tag:yaml.org,2002:binary"),
}
PROGRAM = """
import contextlib, io, json, os, sys
from gpt2_fp8 import run

for folder, words in json.loads(sys.argv[1]):
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run.main(words)
        except SystemExit as end:  # Hydra's, when it has shown something
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=sys.__stdout__, flush=True)
print(json.dumps(sorted({"torch", "lightning", "numpy"} & set(sys.modules))))
"""


def ends(lines: list[tuple[Path, list[str]]], **environment: str) -> list[tuple[int, str, str]]:
    """How each line ends, in its folder: exit code, stdout, stderr. None of them imports torch."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([(str(folder), words) for folder, words in lines])],
        env={**os.environ, "PYTHONPATH": str(ROOT), "SECRET": "s3cr3t", **environment},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    *told, heavy = map(json.loads, done.stdout.splitlines())
    assert heavy == []
    return [tuple(end) for end in told]


def put(folder: Path, content: bytes, name: str = "theirs/experiment/x.yaml") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def check(end: tuple[int, str, str], cause: str, problems: int | None = 1) -> None:
    """Two lines a problem that a terminal can be shown, and nothing else."""
    code, out, err = end
    assert (code, out) == (2, ""), err
    lines = err.splitlines()
    assert problems is None or len(lines) == 2 * problems, err
    assert all(line.startswith("error: ") for line in lines[::2])
    assert all(line.startswith("  fix: ") for line in lines[1::2])
    assert all(line.isprintable() and len(line) <= 300 for line in lines)
    assert cause in err, err
    assert "s3cr3t" not in err


@pytest.mark.parametrize("mode", MODES)
def test_84_a_settings_folder_names_no_code_in_any_mode(tmp_path: Path, mode: str) -> None:
    lines = []
    for number, (content, _) in enumerate(CODE.values()):
        put(tmp_path / str(number), GLOBAL + content + b"\n")
        where = ["hydra.searchpath=[theirs]"] if number % 2 else ["-cd", "theirs"]
        lines.append((tmp_path / str(number), [*mode.split(), *where, "experiment=x"]))
    for (_, cause), end in zip(CODE.values(), ends(lines), strict=True):
        check(end, cause)
    for folder, _ in lines:
        assert os.listdir(folder) == ["theirs"]


def test_84_a_folder_in_place_of_the_programs_own_is_refused_in_every_mode(tmp_path: Path) -> None:
    put(tmp_path, b"seed: 1\n", "theirs/config.yaml")
    for end in ends([(tmp_path, [*mode.split(), "-cp", "theirs"]) for mode in MODES]):
        check(end, "--config-path would hide", None)


def test_84_completion_reads_no_folder_that_a_run_would_refuse(tmp_path: Path) -> None:
    put(tmp_path, UNREADABLE["a bomb"][0])
    (end,) = ends([(tmp_path, ["-sc", "query=bash"])], COMP_LINE="gpt2-fp8 hydra.searchpath=[theirs] experiment=x op")
    check(end, "more than 10,000 values")


def test_84_what_is_shown_of_good_settings_is_as_before(tmp_path: Path) -> None:
    put(tmp_path, GLOBAL + b"run_name: mine_${now:%Y}_${seed}\noptim: {lr: 0.5}\ndefaults:\n- override /model: gpt2\n")
    mine = ["-cd", "theirs", "experiment=x"]
    look = ["--cfg", "job"]
    lines = [["--help"], [*look, *mine], ["--info=searchpath", *mine], ["--hydra-help"],
             [*look, "--resolve", "-p", "model", *mine]]  # fmt: skip
    shown = ends([(tmp_path, words) for words in lines])
    assert [code for code, *_ in shown] == [0, 0, 0, 0, 0], shown
    assert "lr: 0.5" in shown[1][1]
    assert "theirs" in shown[2][1]
    assert "n_layer: 12" in shown[4][1]


def test_84_what_cannot_be_shown_is_told_in_two_lines(tmp_path: Path) -> None:
    whole = (ROOT / "conf/optim/tiny.yaml").read_bytes()
    put(tmp_path, whole.replace(b"global_batch_size: 16\n", b""), "theirs/optim/x.yaml")
    mine = "-cd theirs optim=x"
    lines = {
        "--cfg job foo=1": "there is no key foo",
        "--help model=nope": "model=nope: there is no such choice",
        "--cfg job -m": "cannot be had together",
        "--info=config --resolve": "--resolve says how",
        "--cfg job -p nope": "--package nope",
        "--cfg job --resolve run_name=${nope}": "Interpolation key 'nope' not found",
        "--cfg job seed=1,2": "several values",
        "--cfg all precision=fp32 precision.fallback=error": "precision.fallback belongs to precision=fp8_hybrid",
        f"--cfg job {mine} global_batch_size=4": "none of the files that were chosen has global_batch_size",
        f"{mine} global_batch_size=16": "fix: +global_batch_size=16, to add it",
        "--help data=stdlib data.train_files=[a]": "data.train_files belongs to data=text_files",
    }
    for cause, end in zip(lines.values(), ends([(tmp_path, line.split()) for line in lines]), strict=True):
        check(end, cause)


def test_84_a_configuration_of_ones_own_begins_with_the_programs(tmp_path: Path) -> None:
    put(tmp_path, b"defaults: [config, _self_]\nseed: 7\n", "theirs/mine.yaml")
    put(tmp_path, b"seed: 7\n", "theirs/alone.yaml")
    put(tmp_path, b"<<: {hydra: {help: {template: x}}}\ndefaults: [config]\n", "bad/mine.yaml")
    mine = ["-cd", "theirs", "-cn", "mine"]
    told = ends([(tmp_path, [*mode.split(), *mine]) for mode in ("--cfg=job", "--info=config", "--help")])
    assert [code for code, *_ in told] == [0, 0, 0], told
    assert all("seed: 7\n" in shown for _, shown, _ in told[:2])
    refused = {
        "-cd theirs -cn mine data.seed=-1": "data.seed=-1",
        "-cd theirs -cn alone": "begin alone.yaml with `defaults: [config, _self_]`",
        "-cd theirs -cn alone --cfg=job": "begin alone.yaml with `defaults: [config, _self_]`",
        "-cd theirs -cn nosuch": "the choices are alone, config, mine",
        "hydra.searchpath=[theirs] -cn mine": "the choices are config",
        "-cd bad -cn mine": "holds a merge (<<, line 1)",
    }
    for cause, end in zip(refused.values(), ends([(tmp_path, words.split()) for words in refused]), strict=True):
        check(end, cause, None)


def test_85_a_file_that_is_no_plain_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    lines = []
    for number, (content, _) in enumerate(UNREADABLE.values()):
        put(tmp_path / str(number), content)
        mode = ["--cfg=job"] if number % 2 else []
        lines.append((tmp_path / str(number), [*mode, "-cd", "theirs", "experiment=x"]))
    for (_, cause), end in zip(UNREADABLE.values(), ends(lines), strict=True):
        check(end, cause)


def chain(form: str, times: int, names: str = "a") -> bytes:
    """Eight values, each of which refers to the next so many times."""
    rows = (f"{names}{i}: {form % ', '.join([f'${{{names}{i + 1}}}'] * times)}" for i in range(8))
    return "\n".join([*rows, f"{names}8: x\n"]).encode()


REFERENCES = {  # what: (files of the folder, words of the cause)
    "texts": ({"x": chain("'%s'", 50)}, "x.yaml, line 2, holds a0: its ${...} come to more than 10,000 values"),
    "lists": ({"x": chain("[%s]", 50).replace(b"${", b"'${").replace(b"}", b"}'")}, "line 2, holds a0: "),
    "selected": ({"x": chain("'%s'", 50).replace(b"${", b"${oc.select:")}, "line 2, holds a0: "),
    "over two files": (
        {"x": b"defaults: [y]\n" + b"\n".join(chain("'%s'", 50).splitlines()[:4]),
         "y": GLOBAL + b"\n".join(chain("'%s'", 50).splitlines()[4:])},
        "x.yaml, line 3, holds a0: ",
    ),
    "through others": (
        {"x": b"b: {c: '${a0}'}\nd: ${b}\nrun_name: '%s'\n" % (b"${d.c}" * 50) + chain("'%s'", 8)}, "than 10,000",
    ),
    "long texts": ({"x": b"a0: '%s'\na1: %s\n" % (b"${a1}" * 500, b"x" * 4000)}, "more than 1,048,576 characters"),
    "a circle": ({"x": b"a0: ${a1}\na1: [x, '${a0}']\n"}, "holds a0: its ${...} lead back to itself"),
    "a circle through its own part": ({"x": b"a0: '%s'\n" % (b"${a0.b}" * 100)}, "RecursionError raised"),
}  # fmt: skip


def test_85_references_that_come_to_more_than_any_machine_holds(tmp_path: Path) -> None:
    lines = []
    for number, (files, _) in enumerate(REFERENCES.values()):
        for name, content in files.items():
            put(tmp_path / str(number), GLOBAL + content, f"theirs/experiment/{name}.yaml")
        modes = ["--cfg=job", "--help", "--info=config", "", "-m"] if number < 1 else [""]
        lines += [(tmp_path / str(number), [*mode.split(), "-cd", "theirs", "experiment=x"]) for mode in modes]
    told = ends(lines)
    expected = [cause for _, cause in REFERENCES.values()]
    for cause, end in zip(expected[:1] * 4 + expected, told, strict=True):
        check(end, cause, None)


@pytest.mark.usefixtures("_here")
def test_85_references_typed_on_the_command_line() -> None:
    typed = [f"+a{i}='" + f"${{a{i + 1}}}" * 50 + "'" for i in range(8)]
    assert causes(*typed, "+a8=x") == ["a0: its ${...} come to more than 10,000 values"]
    assert causes("run_name='${ckpt_path}'", "ckpt_path='${run_name}'") == ["run_name: its ${...} lead back to itself"]
    with pytest.raises(UserError, match="come to more than"):
        look_only([*typed, "+a8=x", "--cfg", "job"])


def test_85_what_stands_in_place_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "theirs/experiment"
    (folder / "a.yaml").mkdir(parents=True)
    os.mkfifo(folder / "b.yaml")
    (folder / "c.yaml").symlink_to("/dev/zero")
    (folder / "d.yaml").symlink_to("nowhere")
    (folder / "e.yaml").symlink_to("e.yaml")
    (end,) = ends([(tmp_path, ["-cd", "theirs"])])
    check(end, "a.yaml cannot be read: it is no regular file", 5)
    for name in ("b.yaml cannot", "c.yaml cannot", "d.yaml cannot", "e.yaml cannot"):
        assert name in end[2]


def test_85_a_folder_of_more_than_settings(tmp_path: Path) -> None:
    for number in range(501):
        put(tmp_path, b"seed: 1\n", f"many/experiment/{number}.yaml")
    for number in range(5):
        put(tmp_path, GLOBAL + b"#" * 60_000 + b"\n", f"large/experiment/{number}.yaml")
    many, large = ends([(tmp_path, ["-cd", "many"]), (tmp_path, ["-cd", "large"])])
    check(many, "has more than 500 files of settings")
    check(large, "has more than 262,144 bytes of settings")


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def causes(*words: str) -> list[str]:
    with pytest.raises(UserError) as told:
        preflight(list(words))
    return [problem.cause for problem in told.value.problems]


def test_86_no_message_holds_what_a_terminal_obeys_or_more_than_anyone_reads() -> None:
    error = UserError([Problem("\x1b[2J" + "x" * 10**5, "a\nb\u202e")] * 1000)
    lines = str(error).splitlines()
    assert len(lines) == 2 * 101
    assert all(line.isprintable() and len(line) <= 300 for line in lines)
    assert "and 900 more" in lines[-2]


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("key", ["data.name", "init_from", "callbacks.sample_prompt", "data.cache_dir", "model.name"])
def test_86_a_text_of_a_settings_file_has_an_end(tmp_path: Path, key: str) -> None:
    group, _, leaf = key.rpartition(".")
    text = f"{leaf}: {'x' * 50_000}"
    put(tmp_path, GLOBAL + (f"{group}: {{{text}}}" if group else text).encode())
    assert any(
        "has 50,000 characters" in cause and len(cause) < 300 for cause in causes("-cd", "theirs", "experiment=x")
    )


SHARED = [f"hydra.sweep.subdir={name}" for name in ("x", ".", "${run_name}", "${seed}/../x", "${now:%Y}")]


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("word", SHARED)
def test_87_jobs_of_a_sweep_that_share_a_folder(word: str) -> None:
    (cause,) = causes("-m", "run_name=s", "seed=1,2,3", word)
    assert "jobs 0 and 1 would write into one folder" in cause


@pytest.mark.usefixtures("_here")
def test_87_a_job_within_another_jobs_folder() -> None:
    (cause,) = causes("-m", "run_name=s", "data.name=a,a/b", "hydra.sweep.subdir=${data.name}")
    assert "write into a folder of the other's" in cause


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("word", ["seed=1,1", "hydra.sweep.subdir=${seed}", "hydra.sweep.subdir=${hydra:job.num}_x"])
def test_87_jobs_with_folders_of_their_own(word: str) -> None:
    assert len(preflight(["-m", "run_name=s", *([] if word.startswith("seed") else ["seed=1,2"]), word])) == 2


MANY = {
    "seed=range(0,10000000)": "seed=range(0,10000000) is 10,000,000 jobs",
    "seed=range(0,20000)": "is 20,000 jobs",
    "optim.lr=range(0.1,1e300,0.1)": "jobs, and a sweep has at most 1,000",
    "seed=range(0,100) data.seed=range(0,200)": "seed x data.seed are 20,000 jobs",
    "model=range(0,10000000)": "is 10,000,000 jobs",
}


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("words", MANY)
def test_88_a_sweep_that_would_only_be_checked_for_hours(words: str) -> None:
    assert any(MANY[words] in cause for cause in causes("-m", *words.split()))


@pytest.mark.usefixtures("_here")
def test_88_a_long_sweep_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(preflight(["-m", "seed=range(0,51)"])) == 51
    assert capsys.readouterr().err == "checking 51 jobs, before the first of them begins\n"
    assert sweeps.MOST == 1000


FLOATS = ("optim.lr", "optim.weight_decay", "optim.eps", "optim.max_grad_norm", "callbacks.checkpoint_every_minutes",
          "callbacks.divergence_sigma", "optimizer.matrix_lr", "penalty.z_loss", "penalty.logit_l2",
          "penalty.activation_l1")  # fmt: skip
BIG = ["99999999999999999999", "1000000000001", "1" + "0" * 400]


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("number", [*BIG, "-99999999999999999999", "1e39"])
def test_89_no_number_of_the_settings_is_absurd(number: str) -> None:
    """Every number there is, in a few command lines, since a choice decides which keys exist."""
    told = ""
    for choice, groups in (
        ([], ()),
        (["recipe=delayed"], ("recipe",)),
        (["data=tinyshakespeare"], ("data",)),
        (["optimizer=muon"], ("optimizer",)),
    ):
        keys = [key for key in RANGES if not groups or key.partition(".")[0] in groups]
        told += " ".join(causes(*choice, *(f"{key}={number}" for key in keys)))
    for key in RANGES:
        assert f"{key}=" in told or (key in FLOATS and number in BIG[:2]), key


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("key", LIMITS)
def test_89_some_numbers_have_limits_of_their_own(key: str) -> None:
    most, what = LIMITS[key]
    choice = ["recipe=delayed"] if key.count(".") == 1 and key.startswith("recipe.") else []
    told = causes(*choice, f"{key}={most + 1}")
    assert any(f"{key}={most + 1}: is beyond {most:,} {what}" in cause for cause in told)


@pytest.mark.usefixtures("_here")
def test_89_a_number_of_more_digits_than_python_reads() -> None:
    (cause,) = causes("trainer.max_steps=" + "9" * 5000)
    assert "cannot be read" in cause
    assert len(cause) < 500


HYDRAS = {
    "hydra.job.name=a/b": "hydra.job.name=a/b: the log's file has this name",
    "hydra.job.name=": "is no name of a file",
    "hydra.job.name=..": "is no name of a file",
    "hydra.job.name=" + "x" * 300: "is too long",
    "hydra.job.name=${run_name} run_name=a/b": "hydra.job.name=a/b",
    "hydra.output_subdir=../../x": "leads out of the run's folder",
    "hydra.output_subdir=/etc": "leads out of the run's folder",
    "hydra.output_subdir=checkpoints": "is the run's own",
    "hydra.output_subdir=metrics.csv.tmp": "is the run's own",
    "hydra.output_subdir=.summary.json.tmp/x": "is the run's own",
    "run_name=a\udcff": "run_name=a\\udcff has bytes that are no UTF-8",
    "hydra.verbose=1": "must be true, false, or names of loggers",
    "hydra.verbose=[1]": "must be true, false, or names of loggers",
    "hydra.run.dir=": "is empty",
    "hydra.run.dir=" + "x" * 300: "is too long for a path",
    "hydra.run.dir=" + "x/" * 3000: "is too long for a path",
    "hydra.run.dir=null": "cannot be composed",
    "hydra.sweep.dir= -m seed=1": "is empty",
    "hydra.mode=nope": "cannot be composed",
    "hydra.job.num=x": "cannot be composed",
    "hydra.job.env_copy=[NOPE_]": "NOPE_ is not in the environment",
    "hydra.job.env_copy=x": "needs a list of names",
    "++hydra.job.env_set={'a=b':c}": "cannot be read",
    "hydra.searchpath=theirs": "needs a list of folders",
    "hydra.searchpath=null": "needs a list of folders",
    "hydra.searchpath=[http://x]": "http://x is no folder",
    "+hydra.searchpath=[theirs]": "Hydra would not look there",
    "~hydra.searchpath": "Hydra would not look there",
    "hydra.searchpath=[theirs] hydra.searchpath=[theirs]": "Hydra looks at the first alone",
    "~hydra.run.dir": "every setting of Hydra's has a value",
    "-m seed=1,2 hydra.sweeper.max_batch_size=0": "must be 1 or more, or null",
    "-m seed=1,2 hydra.sweeper.params={seed:'1,2',hydra.job.name:x}": "cannot be composed",
    "hydra.launcher.setup=[x]": "cannot be composed",
    "-m hydra=default": "hydra is not a setting of Hydra's that this program leaves open",
    "--cfg job +hydra={job:{name:x}}": "hydra is not a setting of Hydra's",
}


def test_90_values_of_hydras_own_settings_that_it_would_fall_over(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    lines = [(tmp_path, line.split()) for line in HYDRAS]
    for line, cause, end in zip(HYDRAS, HYDRAS.values(), ends(lines), strict=True):
        check(end, cause, None)
        assert "Traceback" not in end[2], line
    assert os.listdir(tmp_path) == ["theirs"]


def test_90_a_name_of_lightnings_makes_no_shell_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's process waits for its parent's end: Lightning says so in its environment too."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name in ("x", "0", "1"):
        assert not last_say.is_launched([f"hydra.job.name=train_ddp_process_{name}"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert last_say.is_launched(["seed=1", "hydra.job.name=train_ddp_process_1"])
    assert not last_say.is_launched(["hydra.job.name=train_ddp_process_x"])
    assert not last_say.is_launched(["seed=1"])


@pytest.mark.parametrize("words", ["", "--cfg job", "--help", "-m seed=1,2"])
def test_90_a_current_folder_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    check((run.main(words.split()), *capfd.readouterr()), "the current folder is not there any more")
    assert bench.main([]) == 2
    assert "the current folder is not there any more" in capfd.readouterr().err


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    "choice",
    ["experiment=../../../theirs/x", "experiment=..", "model=../model/gpt2", "-cn ../config", "experiment=/etc/passwd",
     "experiment=theirs//x"],
)  # fmt: skip
def test_91_a_choice_stays_in_its_group(tmp_path: Path, choice: str) -> None:
    put(tmp_path, GLOBAL + b"hydra: {callbacks: {x: {_target_: os.mkdir, path: canary}}}\n", "theirs/x.yaml")
    assert causes(*choice.split())
    (end,) = ends([(tmp_path, ["--cfg=job", *choice.split()])])
    assert end[0] == 2
    assert not (tmp_path / CANARY).exists()

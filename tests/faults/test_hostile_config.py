"""Settings from a stranger run no code: each with a canary that must stay absent, refused with 2 before Hydra acts.

The kinds: `_target_` in a task's node, a launcher or sweeper, a `hydra:` node (callbacks, job_logging with a `()`
factory, env_set, chdir, run.dir, searchpath, in hidden folders too), a group named hydra, a package header, a default
of Hydra's, YAML's python tags, aliases that unfold, nesting without end, pipes and devices as settings, secrets of the
environment, names that lead out of outputs/ or carry escapes or a NUL, the command line's hydra.* that builds things.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import checks
from gpt2_fp8.config.errors import UserError
from tests.data.hub_runs import ROOT

GLOBAL = "# @package _global_\n"
CALL = "{_target_: os.mkdir, path: CANARY}"
FACTORY = "{handlers: {x: {'()': os.mkdir, path: CANARY}}, version: 1, root: {handlers: [x]}}"
FOLDERS = {
    # what: (file, content)
    "a _target_": ("experiment/x.yaml", f"{GLOBAL}optim: {CALL}\n"),
    "a _target_ in a list": ("experiment/x.yaml", f"{GLOBAL}data:\n  train_files: [{CALL}]\n"),
    "a _target_ behind an alias": ("experiment/x.yaml", f"{GLOBAL}a: &a {CALL}\noptim: {{x: *a}}\n"),
    "a callback of hydra's": ("experiment/x.yaml", f"{GLOBAL}hydra: {{callbacks: {{x: {CALL}}}}}\n"),
    "a launcher": ("experiment/x.yaml", f"{GLOBAL}hydra: {{launcher: {CALL}}}\n"),
    "a sweeper": ("experiment/x.yaml", f"{GLOBAL}hydra: {{sweeper: {CALL}}}\n"),
    "a log handler": ("experiment/x.yaml", f"{GLOBAL}hydra: {{job_logging: {FACTORY}}}\n"),
    "env_set": ("experiment/x.yaml", f"{GLOBAL}hydra: {{job: {{env_set: {{LD_PRELOAD: CANARY}}}}}}\n"),
    "chdir": ("experiment/x.yaml", f"{GLOBAL}hydra: {{job: {{chdir: true}}}}\n"),
    "run.dir with code": ("experiment/x.yaml", f"{GLOBAL}hydra: {{run: {{dir: CANARY, x: {CALL}}}}}\n"),
    "plugins": ("experiment/x.yaml", f"{GLOBAL}plugins: [CANARY]\n"),
    "plugins to sweep over": (
        "experiment/x.yaml",
        f"{GLOBAL}hydra: {{mode: MULTIRUN, sweeper: {{params: {{plugins: '[CANARY]'}}}}}}\n",
    ),
    "searchpath": ("config.yaml", f"{GLOBAL}hydra: {{searchpath: [pkg://os]}}\n"),
    "a key with a point": ("experiment/x.yaml", f"{GLOBAL}hydra.callbacks: {{x: {CALL}}}\n"),
    "a group of hydra's": ("hydra/launcher/basic.yaml", f"# @package hydra.launcher\n{CALL}\n"),
    "a package header": ("experiment/x.yaml", f"# @package hydra.callbacks\nx: {CALL}\n"),
    "a default of hydra's": ("experiment/x.yaml", f"{GLOBAL}defaults: [override /hydra/launcher: ray]\n"),
    "a default in hydra's place": ("experiment/x.yaml", f"{GLOBAL}defaults: [/optim@hydra.callbacks: tiny]\n"),
    "a python tag": ("experiment/x.yaml", f"{GLOBAL}seed: !!python/object/apply:os.mkdir [CANARY]\n"),
    "a python name": ("experiment/x.yaml", f"{GLOBAL}seed: !!python/name:os.mkdir\n"),
    "a second document": ("experiment/x.yaml", f"seed: 1\n---\nhydra: {{callbacks: {{x: {CALL}}}}}\n"),
    "aliases of aliases": (
        "experiment/x.yaml",
        GLOBAL + "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)),
    ),
    "an alias of itself": ("experiment/x.yaml", f"{GLOBAL}a: &a [*a]\n"),
    "nesting without end": ("experiment/x.yaml", f"{GLOBAL}a: {'[' * 50_000}"),
    "a megabyte": ("experiment/x.yaml", GLOBAL + "\n" * (1 << 20) + "seed: 1"),
    "a deep file": ("experiment/a/b/c/d/e/x.yaml", f"{GLOBAL}hydra: {{callbacks: {{x: {CALL}}}}}\n"),
    "a file with escapes in its name": ("experiment/\x1b[2J.yaml", f"hydra: {{callbacks: {{x: {CALL}}}}}\n"),
    "bytes": ("experiment/x.yaml", "\x80\x04\x95"),
}
CANARY = "canary"


@pytest.fixture(autouse=True)
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "s3cr3t")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    yield
    assert not (tmp_path / CANARY).exists()
    assert "LD_PRELOAD" not in os.environ
    assert time.process_time() - start < 10  # what a hostile file may cost
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KB


def put(name: str, text: str) -> None:
    path = Path("theirs", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.replace("CANARY", CANARY).encode("latin-1"))


def refused(*words: str) -> list[str]:
    """The causes, in two lines each that a terminal can be shown."""
    with pytest.raises(UserError) as told:
        preflight(list(words))
    for problem in told.value.problems:
        assert str(problem).count("\n") == 1
        assert all(part.isprintable() for part in problem)
    return [problem.cause for problem in told.value.problems]


@pytest.mark.parametrize("what", FOLDERS)
def test_a_strangers_folder_is_refused(what: str) -> None:
    name, text = FOLDERS[what]
    put(name, text)
    choice = name.removeprefix("experiment/").removesuffix(".yaml")
    words = [] if "/" not in name or not choice.isprintable() else [f"experiment={choice}"]
    assert refused("-cd", "theirs", *words)
    if what == "a callback of hydra's":
        assert refused("hydra.searchpath=[theirs]", *words)


HIDDEN = ["{callbacks: {x: CALL}}", "{launcher: {_target_: os.mkdir}}", "{job: {env_set: {LD_PRELOAD: x}}}",
          "{job: {chdir: true}}", "{job_logging: {disable_existing_loggers: true}}"]  # fmt: skip


@pytest.mark.parametrize("node", HIDDEN)
def test_a_hidden_folder_is_seen_in_what_it_composes_to(node: str) -> None:
    put("experiment/.x/evil.yaml", f"{GLOBAL}hydra: {node.replace('CALL', CALL)}\n")
    (cause,) = refused("-cd", "theirs", "experiment=.x/evil")
    assert "sets hydra." in cause


def test_a_pipe_or_a_device_is_no_settings() -> None:
    put("experiment/a.yaml", "seed: 1")
    os.mkfifo("theirs/experiment/pipe.yaml")
    Path("theirs/experiment/zero.yaml").symlink_to("/dev/zero")
    causes = refused("-cd", "theirs", "experiment=a")
    assert len(causes) == 2
    assert all("it is no regular file" in cause for cause in causes)


def test_folders_that_link_in_circles() -> None:
    put("experiment/a.yaml", f"{GLOBAL}seed: 5\n")
    for name in ("b", "c", "d"):
        Path("theirs/experiment", name).symlink_to(".")
    assert preflight(["-cd", "theirs", "experiment=a"])[0].seed == 5


SECRETS = {
    "plain": "data: {repo: 'evil/${oc.env:SECRET}'}",
    "with a default": "run_name: ${oc.env:SECRET,x}",
    "decoded": "run_name: ${oc.decode:'${oc.env:SECRET}'}",
    "put together": "run_name: oc\nckpt_path: ${${run_name}.env:SECRET}",
    "by way of a list": "data: {cache_dir: '${oc.create:[\"${oc.env:SECRET}\"]}'}",
}


@pytest.mark.parametrize("how", SECRETS)
def test_a_file_reads_no_variable_of_the_environment(how: str) -> None:
    put("experiment/x.yaml", f"{GLOBAL}{SECRETS[how]}\n")
    causes = refused("-cd", "theirs", "experiment=x", *(["data=fineweb"] if how == "plain" else []))
    assert not any("s3cr3t" in cause for cause in causes)
    if how != "by way of a list":
        assert any("SECRET of the environment is read" in cause for cause in causes) or how == "put together"


def test_the_command_line_may_read_the_environment() -> None:
    put("experiment/x.yaml", f"{GLOBAL}seed: 5\n")
    assert preflight(["run_name=${oc.env:SECRET}"])[0].run_name == "s3cr3t"
    (config,) = preflight(["-cd", "theirs", "experiment=x", "run_name=${oc.env:SECRET}"])
    assert (config.run_name, config.seed) == ("s3cr3t", 5)


@pytest.mark.parametrize("resolver", ["shell:ls", "eval:1", "hydra.nope:x", "os.system:x"])
def test_there_is_no_resolver_that_runs_something(resolver: str) -> None:
    put("experiment/x.yaml", f"{GLOBAL}run_name: ${{{resolver}}}\n")
    assert refused("-cd", "theirs", "experiment=x")


NAMES = ["../x", "../../etc/x", "a/../../x", "/etc/x", "~/x", "a\\..\\x", "\x1b[2J", "a\x07", "a\u202eb", "a\0b",
         "a\nb", "x" * 300, "/".join(["y" * 100] * 30), " ", "", ".", ".."]  # fmt: skip


@pytest.fixture(scope="module")
def configs() -> dict[str, Any]:
    """A configuration for each kind of data, nothing wrong with it but that there is no file."""
    choices = {"stdlib": [], "fineweb": [], "tinyshakespeare": [], "text_files": ["data.train_files=[/etc/hostname]"]}
    return {name: preflight([f"data={name}", *words])[0] for name, words in choices.items()}


def causes_of(config: Any) -> list[str]:
    found = checks.check(config)
    assert all(part.isprintable() for finding in found for part in finding.problem)
    return [finding.problem.cause for finding in found]


@pytest.mark.parametrize("name", NAMES)
def test_a_runs_name_leads_nowhere_else(configs: dict[str, Any], name: str) -> None:
    assert "run_name=" in causes_of(replace(configs["stdlib"], run_name=name))[0]


def test_a_runs_name_from_a_file_leads_nowhere_else() -> None:
    put("experiment/x.yaml", GLOBAL + json.dumps({"run_name": "../\0"}))
    assert "run_name=" in refused("-cd", "theirs", "experiment=x")[0]


TEXTS = [("stdlib", "data.cache_dir"), ("text_files", "data.train_files"), ("fineweb", "data.repo"),
         ("fineweb", "data.revision"), ("tinyshakespeare", "data.path"), ("stdlib", "data.name"),
         ("stdlib", "init_from"), ("stdlib", "ckpt_path"), ("stdlib", "model.name")]  # fmt: skip


@pytest.mark.parametrize("bad", ["a\x1b[2Jb", "a\0b", "a\rb", "a\u202eb"])
@pytest.mark.parametrize(("choice", "key"), TEXTS)
def test_a_text_of_the_settings_is_nothing_that_a_terminal_obeys(
    configs: dict[str, Any], choice: str, key: str, bad: str
) -> None:
    config, (group, _, leaf) = configs[choice], key.rpartition(".")
    change = {leaf: [bad] if leaf.endswith("files") else bad}
    config = replace(config, **({group: replace(getattr(config, group), **change)} if group else change))
    assert any(f"{key}: " in cause and "has control characters" in cause for cause in causes_of(config))


WORDS = [
    "hydra.callbacks.x._target_=os.mkdir",
    "+hydra.callbacks={x:{_target_:os.mkdir,path:canary}}",
    "hydra.sweeper._target_=os.mkdir",
    "hydra.launcher._target_=os.mkdir",
    "hydra.launcher={_target_:os.mkdir}",
    "hydra/launcher=evil",
    "hydra/sweeper=evil",
    "hydra/job_logging=evil",
    "hydra/callbacks=evil",
    "+hydra/callbacks=evil",
    "hydra.job_logging.handlers.x.()=os.mkdir",
    "hydra.job_logging.handlers.console.class=os.mkdir",
    "hydra.hydra_logging.handlers.console.class=os.mkdir",
    "hydra.job_logging.root.handlers=[x]",
    "plugins=[../canary]",
    "hydra.searchpath=[pkg://os]",
    "hydra.runtime.output_dir=x",
    "optim._target_=os.mkdir",
    "+x._target_=os.mkdir",
    "+x={_target_:os.mkdir,path:canary}",
    "experiment@hydra.callbacks=fineweb_edu_fp8",
    "+optim@hydra.launcher=tiny",
    "--experimental-rerun=canary.pickle",
    "--config-path=theirs",
    "hydra.run.dir='a\x1b[2Jb'",
]


def test_the_command_line_builds_nothing() -> None:
    Path("theirs").mkdir()
    causes = refused(*(word for word in WORDS if not word.startswith("-") and "@" not in word))
    for word in WORDS:
        key = word.lstrip("+").partition("=")[0]
        if word.startswith("-") or "@" in word:
            assert refused(word)
        else:
            assert any(key in cause or ("pkg://" in word and "pkg://os is" in cause) for cause in causes), word


def test_by_hydra_itself_nothing_runs(tmp_path: Path) -> None:
    """The real program on the worst of them: 2, and no canary, no folder, no traceback."""
    program = (
        "import contextlib, io, json, sys\nfrom gpt2_fp8 import run\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    stderr = io.StringIO()\n"
        "    with contextlib.redirect_stderr(stderr): code = run.main(words)\n"
        "    print(json.dumps([code, stderr.getvalue()]))\n"
    )
    lines = []
    for number, what in enumerate(["a callback of hydra's", "a log handler", "a python tag", "env_set", "a _target_"]):
        name, text = FOLDERS[what]
        put(f"../theirs{number}/{name}", text)
        lines.append(["-cd", f"theirs{number}", "experiment=x"])
    lines += [[word] for word in WORDS[:4]]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(lines)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for line, (code, stderr) in zip(lines, map(json.loads, done.stdout.splitlines()), strict=True):
        assert code == 2, line
        assert len(stderr.splitlines()) == 2, stderr
    assert not Path("outputs").exists()

"""Command lines and settings folders: keys with values that nobody should give them, flags, and strangers' YAML."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import strategies as st

from gpt2_fp8.config.keys import key_paths
from gpt2_fp8.config.schema import RunConfig
from tests.fuzz.place import SMALL, Place

KEYS = sorted(key_paths(RunConfig))
GROUPS = ["model", "recipe", "precision", "data", "trainer", "optim", "callbacks", "logger", "experiment", "debug"]
HYDRA = [
    "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.verbose", "hydra.mode",
    "hydra.job.name", "hydra.job.chdir", "hydra.job.env_set", "hydra.job.env_set.X", "hydra.launcher",
    "hydra.launcher.x", "hydra.sweeper", "hydra.sweeper.params", "hydra.searchpath", "hydra/launcher", "hydra/sweeper",
    "hydra/job_logging", "hydra/hydra_logging", "hydra.job_logging.root.level", "hydra.callbacks.x",
    "hydra.help.header",
    "hydra.runtime.output_dir",
]  # fmt: skip
CALL = "{_target_: os.mkdir, path: canary}"
HANDLER = "{version: 1, handlers: {x: {'()': os.mkdir, path: canary}}, root: {handlers: [x]}}"
PLAIN = [
    "", "null", "true", "???", "0", "1", "-1", "2.5", "1e400", "-1e400", "nan", "1e-320", "99999999999999999999",
    "9" * 400, "9" * 5000, "0x10", "1_000", "auto", "x", "tiny", "last", "best", "[]", "{}", "[1,2]", "{a:1}", "[[[]]]",
    "../x", "/etc", "~", "a/b", ".", "-", "\x1b[2J", "'a\x07b'", "'a\rb'", "a\u202eb", "ü", "日本", "x" * 3000, "=",
    "a=b", "'", '"',
    "[", "{", "(", "\\", "$", "${", "${}", "${seed}", "${run_name}", "${oc.env:SECRET}", "${oc.env:SECRET,x}",
    "${now:%Y}",
    "${oc.decode:'${seed}'}", "${hydra:job.num}", "${hydra.job.num}", "${hydra:runtime.cwd}", "${oc.create:{a:1}}",
    "${nope:1}",
    "${optim}", "${a.b}", CALL, HANDLER, "range(0,3)", "choice(1,2)", "1,2", "interval(0,1)", "glob(*)", "sort(2,1)",
    "range(0,1e9)",
    "tag(a,choice(1))", "int(2)", "str(2)", "float(x)", "json_str([])", "shuffle(1,2)", "extend_list(1)", "file",
    "here\udcff",
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(PLAIN),
    st.integers(-3, 70).map(str),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
)
WORDS = st.one_of(
    st.tuples(st.sampled_from(["", "", "", "", "+", "++", "~"]), st.sampled_from(KEYS), VALUES).map(
        lambda t: f"{t[0]}{t[1]}={t[2]}"
    ),
    st.tuples(st.sampled_from(GROUPS), VALUES).map("=".join),
    st.tuples(st.sampled_from(["", "", "+"]), st.sampled_from(HYDRA), VALUES).map(lambda t: f"{t[0]}{t[1]}={t[2]}"),
    st.tuples(st.sampled_from(KEYS), st.integers(0, 12),
        VALUES).map(lambda t: f"{t[0][: t[1]]}{t[0][t[1] + 1 :]}={t[2]}"),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
)  # fmt: skip
FLAGS = st.sampled_from([
    [], [], [], [], [], ["-m"], ["--cfg", "job"], ["--cfg", "hydra"], ["--cfg", "all"], ["--cfg", "job", "--resolve"],
    ["--cfg", "job", "-p", "optim"], ["-p", "nope", "--cfg", "job"], ["--help"], ["-h"], ["--hydra-help"], ["--info"],
    ["--info", "all"], ["--info", "searchpath"], ["--info", "defaults-tree"], ["--version"], ["-cp", "theirs"],
    ["-cn", "mine"], ["-cn", "../x"], ["-cd", "nowhere"], ["--experimental-rerun", "x"], ["--run"], ["--lr", "1"],
    ["-cp", "theirs", "--help"], ["--resolve"],
])  # fmt: skip

HEADERS = st.sampled_from(["# @package _global_\n"] * 4 + [
    "", "# @package _group_\n", "# @package hydra\n", "# @package hydra.callbacks\n", "\ufeff# @package _global_\n",
    "# @package\n", "# @package optim,model\n", "%YAML 1.1\n---\n",
])  # fmt: skip
NODES = [
    f"optim: {CALL}\n", f"data: {{train_files: [{CALL}]}}\n", f"a: &a {CALL}\noptim: *a\n",
    f"hydra: {{callbacks: {{x: {CALL}}}}}\n",
    f"hydra: {{launcher: {CALL}}}\n", f"hydra: {{job_logging: {HANDLER}}}\n", f"hydra: {{hydra_logging: {HANDLER}}}\n",
    "hydra: {job: {env_set: {LD_PRELOAD: canary}}}\n", "hydra: {searchpath: [pkg://os]}\n",
    "hydra: {run: {dir: canary}}\n",
    "hydra: {help: {template: '${oc.env:SECRET}'}}\n",
    f"{HANDLER[1:-1].replace(', h', chr(10) + 'h').replace(', r', chr(10) + 'r')}\n",
    "defaults: [override /hydra/launcher: joblib]\n", "defaults: [/optim@hydra.callbacks: tiny]\n", "defaults: [x]\n",
    "defaults: {}\n",
    "defaults: [experiment/x]\n", "defaults: [null, 1, [2]]\n", "defaults: [/model: ../../../etc/passwd]\n",
    "seed: !!python/object/apply:os.mkdir [canary]\n", "seed: !!python/name:os.mkdir\n", "seed: !!binary x\n",
    "seed: !!int x\n",
    "seed: !x 1\n", "seed: 1\n---\nseed: 2\n", "seed: 1\nseed: 2\n", "a: &a [*a]\n", "? [1, 2]\n: 3\n",
    "? {a: 1}\n: 3\n", "1: 2\n",
    "null: 1\n", "2001-01-01: 1\n", "<<: {seed: 5}\n", "seed: *nope\n", "seed: 2001-01-01\n", "seed: 0o7\n",
    "seed: 1:30\n",
    "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
    "a: " + "[" * 3000, "a: " + "{a: " * 300 + "1" + "}" * 300, "\t- x\n", "- 1\n- 2\n", "5\n", "x: |\n  \x07\n",
    "run_name: ${oc.env:SECRET}\n",
    "run_name: '${oc.env:SECRET,x}'\n", "optim: ${oc.create:'{lr: 1}'}\n", "optim: ${model}\n", "seed: ${seed}\n",
    "seed: ${optim.lr}\n",
    "optim: {lr: ${optim.lr}}\n", "data: null\n", "model: []\n", "optim: {'a.b': 1}\n", "optim: {'': 1}\n",
    "'\\e[2J': 1\n",
    f"seed: {'9' * 5000}\n", f"{'k' * 5000}: 1\n", f"run_name: {'v' * 5000}\n", "seed: 1" + "\n" * 5000,
]  # fmt: skip
FILES = ["experiment/x.yaml"] * 5 + [
    "model/x.yaml", "optim/x.yaml", "data/x.yaml", "recipe/x.yaml", "config.yaml", "mine.yaml",
    "hydra/job_logging/x.yaml",
    "hydra/hydra_logging/default.yaml", "hydra/help/default.yaml", "hydra/launcher/x.yaml", "hydra/config.yaml",
    "experiment/.h/x.yaml", "experiment/\x1b[2J.yaml", "x.yaml", "experiment/x.yml", "experiment/a b.yaml",
    "new/x.yaml",
]  # fmt: skip


@st.composite
def _files(draw: Any) -> dict[str, str]:
    """A settings folder: names, and contents as latin-1 has them."""
    made = {}
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(st.integers(0, 9))
        if kind < 6:
            text = draw(HEADERS) + "".join(draw(st.lists(st.sampled_from(NODES), min_size=1, max_size=2)))
        elif kind < 9:
            keys = draw(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=3))
            text = draw(HEADERS) + yaml.safe_dump(_nested(keys), allow_unicode=draw(st.booleans()))
        else:
            text = draw(st.binary(max_size=60)).decode("latin-1")
        made[draw(st.sampled_from(FILES))] = text.encode(errors="replace").decode("latin-1") if kind < 9 else text
    return made


def _nested(keys: list[tuple[str, str]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in keys:
        *above, last = key.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        if isinstance(node, dict):
            node[last] = yaml.safe_load(value) if value in ("null", "0", "1", "-1", "[]", "{}", "[1,2]") else value
    return tree


@st.composite
def _cases(draw: Any) -> dict[str, Any]:
    files = draw(st.one_of(st.just({}), st.just({}), _files()))
    words = draw(st.lists(WORDS, max_size=3))
    if files:
        chosen = [name.removesuffix(".yaml").split("/", 1) for name in files if "/" in name and ".yaml" in name]
        words += [
            f"{group}={choice}" for group, choice in chosen if not group.startswith("hydra") or draw(st.booleans())
        ]
    flags = draw(FLAGS)
    folder = (
        draw(st.sampled_from([["-cd", "theirs"], ["-cd", "theirs"], ["hydra.searchpath=[theirs]"]])) if files else []
    )
    return {"argv": [*flags, *folder, *SMALL, *words], "files": files, "added": words}


CASES = _cases()


def try_one(case: dict[str, Any], place: Place, typed: bool = False) -> str:
    """Run the command line. Where the run begins, a whole number that was typed is what it has."""
    for name, text in case["files"].items():
        path = place.here / "theirs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    outcome = place.run(*case["argv"], typed=typed)
    for settings in outcome.noted("settings"):
        for word in [] if "-m" in case["argv"] or case["files"] else case["argv"]:
            key, _, value = word.partition("=")
            if key in KEYS and value.isascii() and value.isdecimal() and _last(key, case["argv"]) == word:
                place.expect(
                    _at(settings, key) in (int(value), float(value), value), f"{word} came to {_at(settings, key)!r}"
                )
    return str(outcome.code)


def _last(key: str, argv: list[str]) -> str:
    return [word for word in argv if word.lstrip("+").partition("=")[0] == key][-1]


def _at(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = settings[part]
    return settings

"""The documents: their commands are accepted, the README's first ones run, what they name exists."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gpt2_fp8 import evaluate, export, generate, prepare
from gpt2_fp8.compose import benchmark, conf_dir, preflight
from gpt2_fp8.config import errors
from gpt2_fp8.config.keys import key_paths, unknown_key
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.tokenizer_file import NAMES
from gpt2_fp8.runtime import programs
from gpt2_fp8.train.loggers import FP8_COLUMNS
from gpt2_fp8.train.run_end import Summary
from tests import settings_page
from tests.data.tokenizers_made import write_json
from tests.runs import forked, metrics

ROOT = Path(__file__).resolve().parents[1]
README, ARCHITECTURE = ROOT / "README.md", ROOT / "ARCHITECTURE.md"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
RUN = ["python", "-m", "gpt2_fp8.run"]
PROGRAMS = ["gpt2_fp8", *(f"gpt2_fp8.{name}" for name in programs.names())]
OTHERS = {"accelerate", "docker", "export", "hf", "litgpt", "lm_eval", "mlflow", "pip", "pytest", "sbatch", "srun"}
OTHERS |= {"tensorboard", "torchrun"}
CHECKS = {
    "gpt2_fp8.run": preflight, "gpt2_fp8.schedule": preflight, "gpt2_fp8.prepare": lambda argv: prepare.parse(argv)[1],
    "gpt2_fp8.bench": lambda argv: benchmark.preflight(argv, True)[1],
}  # fmt: skip
# Metrics of a GPU, or of an option.
ONLY_SOMETIMES = {"mfu_bf16", "gpu_power_watts", "gpu_utilization", "penalty", "ranking/acc", "ranking/acc_norm"}


def blocks(document, language):
    """The contents of the document's fenced blocks in `language`, indented ones included."""
    fenced = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", document.read_text(), re.MULTILINE | re.DOTALL)
    return [content for name, content in fenced if name == language]


def commands(document):
    for block in blocks(document, "bash"):
        for line in re.split(r"\n| && ", block.replace("\\\n", " ")):
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                yield words


def rows(document, header):
    """The cells of a table's rows, found by the first cell of its header."""
    table = re.search(rf"^\| {re.escape(header)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", document.read_text(), re.MULTILINE)
    assert table, f"{document.name} has no table that starts with {header!r}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[1].splitlines()]


def names(text):
    return re.findall(r"`([^`]+)`", text)


def documented(page, header):
    return {name for row in rows(ROOT / "docs" / page, header) for name in names(row[0])}


def stand_ins(argv):
    """Make what a command line reads, in the current folder."""
    for word in argv:
        if not re.match(r"(data\.\S*(files|path|tokenizer)|callbacks.ranking|init_from|ckpt_path)=", word):
            continue
        key, value = (override := OverridesParser.create().parse_override(word)).key_or_group, override.value()
        if key == "callbacks.ranking":
            Path(str(value)).write_text('{"ctx": "a", "endings": ["b", "c"], "label": 0}')
        elif key.endswith(("files", "path")) and key != "ckpt_path":
            for name in value if isinstance(value, list) else [value]:
                path = Path(str(name).replace("*", "00000"))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("text")
        elif key == "data.tokenizer" and value not in NAMES:
            write_json(Path(str(value)), ["?"], ["</s>"], "</s>")
        elif key != "data.tokenizer" and value not in ("last", "best"):
            Path(str(value)).mkdir(parents=True, exist_ok=True)


def check(words):
    """Have a command's own program check it, before it would begin. A launcher's command ends with a run's."""
    program = next((word for word in words if word in CHECKS), None)
    program = "gpt2_fp8" if words[:2] == ["docker", "run"] else program
    if program:
        assert CHECKS.get(program, preflight)(words[words.index(program) + 1 :])
    elif words[0] == "python" and words[1].startswith("benchmarks/"):
        assert (ROOT / words[1]).is_file()
        assert "--" not in words or preflight(words[words.index("--") + 1 :])
    else:
        assert words[0] in OTHERS or words[1] == "-c" or words[2] in PROGRAMS


@pytest.mark.parametrize("page", [p for p in PAGES if "```bash" in p.read_text()], ids=lambda page: page.name)
def test_commands_are_accepted(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    text = page.read_text()
    places = re.findall(r"mine/\w+/\w+\.yaml", text)
    for place, choice in zip(places, blocks(page, "yaml")):  # noqa: B905
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(choice)
        stand_ins([f"data.train_files=[{name}]" for name in re.findall(r"train_files: \[(.+)\]", text)])
    for words in commands(page) if page.name != "plugins.md" else []:  # `tests/train/test_plugins.py` runs that
        stand_ins(words)
        check(words)


def test_the_first_commands_run(tmp_path, monkeypatch):
    """As the README has them, but for the length: its log's labels, its folder, its metrics, what is made of it."""
    few = ["trainer.max_steps=3", "optim.warmup_steps=1", "data.val_sequences=4", "trainer.val_check_interval=2"]
    typed = [words for words in commands(README) if any(word.endswith(("=first", "/first")) for word in words)]
    forked(*typed[0][len(RUN) :], *few, cwd=tmp_path, code=0)
    folder = tmp_path / "outputs/first"

    shown, tree = (next(b for b in blocks(README, "text") if start in b) for start in ("] model ", "outputs/first/\n"))
    label = re.compile(r"^\[[\d:]{8}\] ([a-z]\w*)\b:?", re.MULTILINE)
    log = (folder / "run.log").read_text()
    assert set(label.findall(shown)) - {"gpt2_fp8"} == set(label.findall(log)), "torch was loaded before"
    assert re.search(r" loss 2\.2249 .* val_loss 2\.4933 ", shown, re.DOTALL)
    top = {match[1].rstrip("/") for match in re.finditer(r"^  (\S+)", tree, re.MULTILINE)}
    assert top == {path.name for path in folder.iterdir()}
    assert documented("output.md", "metric") - ONLY_SOMETIMES == set(metrics(folder)) - {"step"}

    monkeypatch.chdir(tmp_path)
    mains = {
        "gpt2_fp8.generate": (generate.main, ["tokens=5"]), "gpt2_fp8.export": (export.main, []),
        "gpt2_fp8.evaluate": (evaluate.main, ["data.val_sequences=2"]),
    }  # fmt: skip
    uses = [words for words in typed if words[2] in mains]
    assert {words[2] for words in uses} == set(mains)
    for words in uses:
        main, few = mains[words[2]]
        assert main([*(word for word in words[3:] if word != "data.val_sequences=1000"), *few]) == 0


@pytest.mark.parametrize(
    "page", [README, ROOT / "docs/models.md", ROOT / "docs/coming-from.md"], ids=lambda page: page.name
)
def test_the_mistakes_shown_are_answered_so(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed, _, answer = next(b for b in blocks(page, "text") if b.startswith("$ ")).partition("\n")
    with pytest.raises(errors.UserError) as caught:
        preflight(shlex.split(typed)[1 + len(RUN) :])
    assert str(caught.value) == answer.strip()


def test_the_tables_are_the_programs():
    assert documented("what-to-watch.md", "column") == set(FP8_COLUMNS)
    assert documented("output.md", "keys") == vars(Summary(precision={})).keys() - {"_began"}
    groups = {path.name: {file.stem for file in path.glob("*.yaml")} for path in conf_dir().iterdir() if path.is_dir()}
    listed = {names(row[0])[0]: set(names(row[1])) for row in rows(ROOT / "docs/settings.md", "group")}
    assert listed == {name: choices for name, choices in groups.items() if name != "hydra"}
    assert settings_page.page() == settings_page.PAGE.read_text(), "python -m tests.settings_page"


def test_other_trainers_names_are_answered_as_the_page_says():
    page, ours = ROOT / "docs/coming-from.md", [*key_paths(RunConfig), *vars(preflight([])[0])]
    for header in ("nanoGPT", "`litgpt pretrain`", "`TrainingArguments`"):
        for theirs, here in ((names(cell) for cell in row) for row in rows(page, header)):
            theirs, here = ([word.partition("=")[0] for word in words] for words in (theirs, here))
            assert {*here} <= {*ours}, theirs
            for leaf in {name.rpartition(".")[2] for name in theirs} - {*ours, "interval", "resume", "logger_name"}:
                assert any(key in unknown_key(leaf, [], key_paths(RunConfig))[1] for key in here), leaf


def test_every_extra_is_explained():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert documented("install.md", "extra") == set(extras)


def test_links_and_files_exist():
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)]+)\)", text):
            name, _, place = link.partition("#")
            target = page.parent / name if name else page
            if not link.startswith("https://"):
                assert target.exists(), (page.name, link)
                assert not place or place in anchors(target), (page.name, link)
        for name in names(text) if page in (README, ARCHITECTURE) or page.name == "glossary.md" else []:
            if re.fullmatch(r"[\w./-]+\.(py|yaml|md)", name):
                assert (ROOT / name).is_file() or (ROOT / "gpt2_fp8" / name).is_file(), (page.name, name)


def anchors(document):
    """What a link to a heading of the document may end in."""
    titles = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

"""What the documents say is so: their commands compose and run, and what they name exists."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser as accelerate_options
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch.distributed.run import get_args_parser as torchrun_options

from gpt2_fp8 import compare, doctor, evaluate, export, generate, prepare, table
from gpt2_fp8.compose import benchmark, conf_dir, preflight
from gpt2_fp8.config import errors
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.config.tokenizer_file import NAMES
from gpt2_fp8.data.tokenizer import GPT2_FILES
from gpt2_fp8.runtime import programs
from gpt2_fp8.train.summary import Precision, Summary
from tests import settings_page
from tests.data.tokenizers_made import write_json
from tests.diagnose.machines import GB10_CPU_TORCH
from tests.ranks import srun
from tests.reports.made import rows as rows_of_a_log
from tests.reports.made import run, settings
from tests.runs import forked, metrics

ROOT = Path(__file__).resolve().parents[1]
README, ARCHITECTURE, PERFORMANCE = (ROOT / name for name in ("README.md", "ARCHITECTURE.md", "docs/performance.md"))
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
MODELS, NUMERICS = ROOT / "docs/models.md", ROOT / "docs/numerics.md"
DOCUMENTS = [README, ARCHITECTURE, PERFORMANCE, NUMERICS, CONTRIBUTING, MODELS, ROOT / "docs/python.md"]
DOCUMENTS += [ROOT / "CHANGELOG.md", ROOT / "docs/huggingface.md", ROOT / "docs/seeds.md"]
DOCUMENTS.append(ROOT / "docs/optimizers.md")
QUALITY = ROOT / "docs/quality.md"
DOCUMENTS.append(QUALITY)
DATA = ROOT / "docs/data.md"
DOCTORS_PAGE, WATCH = ROOT / "docs/doctor.md", ROOT / "docs/what-to-watch.md"
FP8, SETTINGS, CHECKPOINTS, OUTPUT, SWEEPS = (
    ROOT / f"docs/{name}.md" for name in ("fp8", "settings", "checkpoints", "output", "sweeps")
)
DOCUMENTS += [FP8, SETTINGS, CHECKPOINTS, OUTPUT, SWEEPS, ROOT / "docs/several-gpus.md", ROOT / "docs/benchmark.md"]
DOCUMENTS += [DATA, DOCTORS_PAGE, WATCH, ROOT / "docs/generate.md", ROOT / "docs/evaluate.md", ROOT / "docs/log.md"]
DOCUMENTS += [ROOT / "docs/compare.md", ROOT / "docs/clusters.md", ROOT / "docs/slurm.md"]
LAUNCHERS = ("torchrun", "srun", "accelerate")
PROGRAMS = ["gpt2_fp8", *(f"gpt2_fp8.{name}" for name in programs.names())]
RUN, BENCH, EXPORT, TABLE, SCHEDULE, DOCTOR, GENERATE, EVALUATE, COMPARE, PREPARE = (
    ["python", "-m", f"gpt2_fp8.{program}"]
    for program in (
        "run", "bench", "export", "table", "schedule", "doctor", "generate", "evaluate", "compare", "prepare",
    )
)  # fmt: skip
ON_A_GPU = {"mfu_bf16", "gpu_power_watts", "gpu_utilization"}  # metrics that a CPU does not have
OF_AN_OPTION = {"penalty"}  # `test_penalty` reads it


class Command(NamedTuple):
    """A command of a fenced bash block, its words as the shell would split them."""

    document: str
    words: list[str]

    @property
    def argv(self):
        return self.words[len(RUN) :]

    def __str__(self):
        return f"{self.document}: {shlex.join(self.words)}"


def blocks(document, language):
    """The contents of the document's fenced blocks in `language`, indented ones included."""
    fenced = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", document.read_text(), re.MULTILINE | re.DOTALL)
    return [content for name, content in fenced if name == language]


def commands(document):
    for block in blocks(document, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words: list[str] = []
            for word in [*shlex.split(line, comments=True), "&&"]:
                if word != "&&":
                    words.append(word)
                    continue
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words:
                    yield Command(document.name, words)
                words = []


def rows(document, header):
    """The cells of a table's rows, found by the first cell of its header."""
    lines = iter(document.read_text().splitlines())
    for line in lines:
        if line.startswith(f"| {header} |"):
            next(lines)
            found = []
            for row in lines:
                if not row.startswith("|"):
                    return found
                found.append([cell.strip() for cell in row.strip("|").split("|")])
    raise AssertionError(f"{document.name} has no table that starts with {header!r}")


def names(text):
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


ALL = [found for document in DOCUMENTS for found in commands(document)]
RUNS = [found for found in ALL if found.words[: len(RUN)] == RUN]
BENCHES = [found for found in ALL if found.words[: len(BENCH)] == BENCH]
FIRST = RUNS[0]


def stand_ins(argv):
    """Make what a command line reads, in the current folder."""
    for word in argv:
        if "=" not in word:
            continue
        override = OverridesParser.create().parse_override(word)
        key, value = override.key_or_group, override.value()
        if re.fullmatch(r"data\.(sources\.\w+\.)?(train_files|val_files|path)", key):
            for name in value if isinstance(value, list) else [value]:
                path = Path(str(name).replace("*", "00000"))
                assert not path.is_absolute(), f"{word}: nobody else has this path"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("text")
        elif key == "init_from" or (key == "ckpt_path" and value not in ("last", "best")):
            Path(str(value)).mkdir(parents=True)
        elif key == "data.tokenizer" and value not in NAMES:
            write_json(Path(str(value)), ["?"], ["</s>"], "</s>")


def own_choice(document, folder):
    """Write the choice that a page has as YAML where the page says that it is, and the texts that it names."""
    (text,) = blocks(document, "yaml")
    (place,) = set(re.findall(r"mine/\w+/\w+\.yaml", document.read_text()))
    (folder / place).parent.mkdir(parents=True)
    (folder / place).write_text(text)
    for name in re.findall(r"train_files: \[(.+)\]", text):
        stand_ins([f"data.train_files=[{name}]"])


def test_the_page_of_models_names_each_key_and_each_model():
    keys = {name for row in rows(MODELS, "key") for name in names(row[0])}
    shared = {"name", "n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "dropout"}
    assert keys == {field.name for field in fields(ModelConfig)} - shared
    for row in rows(MODELS, "key"):
        for key in names(row[0]):
            default = True if key == "bias" else getattr(ModelConfig, key)
            assert yaml.safe_load(names(row[1])[0]) == default, key
    listed = {name for row in rows(MODELS, "model") for name in names(row[0])}
    assert listed == {path.stem for path in (conf_dir() / "model").glob("*.yaml")}


def test_the_refusals_of_the_page_of_models_are_what_is_said():
    (text,) = blocks(MODELS, "text")
    command, _, told = text.partition("\n")
    with pytest.raises(errors.UserError) as caught:
        preflight(shlex.split(command)[4:])
    assert str(caught.value) == told.rstrip()


def test_the_documents_have_commands():
    assert FIRST.argv == []
    assert {found.document for found in RUNS} == {
        "README.md",
        "models.md",
        "performance.md",
        "quality.md",
        "numerics.md",
        "huggingface.md",
        "seeds.md",
        "optimizers.md",
        "data.md",
        "what-to-watch.md",
        "log.md",
        "fp8.md",
        "settings.md",
        "checkpoints.md",
        "sweeps.md",
        "several-gpus.md",
        "compare.md",
        "slurm.md",
    }
    assert len(RUNS) > 12


@pytest.mark.parametrize("found", RUNS, ids=str)
def test_every_run_composes(found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "-cd" in found.argv:
        own_choice(ROOT / "docs" / found.document, tmp_path)
    stand_ins(found.argv)
    configs = preflight(found.argv)
    swept = "-m" in found.argv and any("," in word for word in found.argv)
    assert len(configs) > 1 if swept else len(configs) == 1


def test_every_launched_run_composes(tmp_path, monkeypatch):
    """And its launcher takes its options, as far as they are installed here."""
    monkeypatch.chdir(tmp_path)
    launched = [found.words for found in ALL if found.words[0] in LAUNCHERS]
    assert {words[0] for words in launched} == set(LAUNCHERS)
    for words in launched:
        place = words.index("gpt2_fp8.run")
        assert words[place - 1] == "-m"
        of_run = words[place + 1 :]
        stand_ins(of_run)
        assert len(preflight(of_run)) == 1
        if words[0] == "torchrun":
            options = torchrun_options().parse_args(words[1:])
            assert (options.module, options.training_script) == (True, "gpt2_fp8.run")
        elif words[0] == "accelerate":
            options = accelerate_options().parse_args(words[2:])
            assert (options.module, options.training_script) == (True, "gpt2_fp8.run")


@pytest.mark.parametrize("found", BENCHES, ids=str)
@pytest.mark.parametrize("gpu", [True, False])
def test_every_benchmark_composes(found, gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in found.argv:
        if word.startswith("bench.rows="):
            copy = tmp_path / word.partition("=")[2]
            copy.parent.mkdir(parents=True)
            copy.write_text((ROOT / word.partition("=")[2]).read_text())
    _, cases = benchmark.preflight(found.argv, gpu)
    assert cases


def test_the_words_of_every_script_beside_the_package_compose(tmp_path, monkeypatch):
    """`test_benchmarks` runs the scripts."""
    monkeypatch.chdir(tmp_path)
    scripts = [found.words for found in ALL if found.words[0] == "python" and found.words[1].startswith("benchmarks/")]
    assert len(scripts) > 20
    for words in scripts:
        assert (ROOT / words[1]).is_file()
        if "--" in words:
            of_run = words[words.index("--") + 1 :]
            stand_ins(of_run)
            assert len(preflight(of_run)) == 1


def test_every_command_is_of_a_known_kind():
    """A new kind of command needs a test of its own."""
    known = {
        ("python", "-m"),
        ("python", "-c"),
        ("sbatch",),
        ("pip", "install"),
        ("pytest",),
        ("export",),
        ("docker",),
        ("lm_eval",),
        ("tensorboard",),
        *((name,) for name in LAUNCHERS),
    }
    for found in ALL:
        start = tuple(found.words[:2]) if found.words[0] in ("python", "pip") else (found.words[0],)
        assert start in known or start[-1].startswith("benchmarks/"), str(found)
        assert start != ("python", "-m") or found.words[2] in PROGRAMS, str(found)


def test_every_export_is_read(tmp_path, monkeypatch, capsys):
    """As far as the checkpoint that is not there."""
    monkeypatch.chdir(tmp_path)
    exports = [found for found in ALL if found.words[: len(EXPORT)] == EXPORT]
    assert exports
    for found in exports:
        assert export.main(found.argv) == 2
        (told,) = re.findall("^error: (.*)$", capsys.readouterr().err, re.MULTILINE)
        assert told.startswith(f"{found.argv[0]} does not exist")


def test_every_schedule_is_that_of_a_run():
    schedules = [found for found in ALL if found.words[: len(SCHEDULE)] == SCHEDULE]
    assert schedules
    for found in schedules:
        preflight(found.argv)


def test_every_preparation_is_that_of_a_run(tmp_path, monkeypatch):
    """`test_prepare` does what these ask for, on other text."""
    monkeypatch.chdir(tmp_path)
    preparations = [found for found in ALL if found.words[: len(PREPARE)] == PREPARE]
    assert len(preparations) >= 4
    for found in preparations:
        stand_ins(found.argv)
        own, configs = prepare.asked(found.argv)
        assert own.all == ("--all" in found.argv)
        assert own.steps == (100 if "--steps" in found.argv else None)
        assert len(configs) == 1


def test_every_batch_job_is_a_run(monkeypatch):
    """`tests/slurm` sends the script to a SLURM."""
    script = "docs/slurm/train.sh"
    assert (ROOT / script).is_file()
    sent = [found.words for found in ALL if found.words[0] == "sbatch" and script in found.words]
    assert sent
    for words in sent:
        options = dict(word.split("=") for word in words[1 : words.index(script)])
        nodes, tasks = int(options.get("--nodes", 1)), int(options.get("--ntasks-per-node", 1))
        of_srun = srun(nodes * tasks)(0)
        of_srun |= {"SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})"}
        for name, value in (of_srun | {"MASTER_ADDR": "127.0.0.1"}).items():
            monkeypatch.setenv(name, value)
        preflight(words[words.index(script) + 1 :])


def test_a_preparation_says_what_the_page_shows(tmp_path, monkeypatch, capsys):
    """Numbers are those of another Python."""
    monkeypatch.chdir(tmp_path)
    (shown,) = blocks(DATA, "text")
    alone = [block for block in blocks(DATA, "bash") if block.startswith("python -m gpt2_fp8.prepare data.cache_dir")]
    command = shlex.split(alone[0])
    assert prepare.main(command[len(PREPARE) :]) == 0

    def form(text):
        return re.sub(r"[\d,.]*\d", "N", text)

    assert form(capsys.readouterr().out) == form(shown)


def test_every_table_is_asked_for_as_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tables = [found for found in ALL if found.words[: len(TABLE)] == TABLE]
    assert tables
    for found in tables:
        assert table.main(found.argv) == 2
        assert f"error: {found.argv[0]} is no folder" in capsys.readouterr().err


def test_every_comparison_is_done_as_shown(tmp_path, monkeypatch, capsys):
    """On made runs in the folders that are named; on one of them, or none, it would refuse."""
    monkeypatch.chdir(tmp_path)
    for place, (name, precision) in enumerate((("small_bf16", "bf16"), ("small_fp8", "fp8_hybrid"))):
        for sweep in (name, f"my_sweep/{name}"):
            run(
                tmp_path / "outputs" / sweep / "0",
                rows_of_a_log(lambda step, more=place: 3.0 + more),
                settings(precision),
            )
    comparisons = [found for found in ALL if found.words[: len(COMPARE)] == COMPARE]
    assert len(comparisons) > 3
    for found in comparisons:
        words = found.argv[: found.argv.index(">")] if ">" in found.argv else found.argv
        assert compare.main(words) == 0, str(found)
        capsys.readouterr()


def test_every_check_of_a_machine_is_asked_for_as_shown(monkeypatch, capsys):
    """Of the machine whose report the page shows."""
    checks = [found for found in ALL if found.words[: len(DOCTOR)] == DOCTOR]
    assert len(checks) >= 2
    monkeypatch.setattr(doctor.probe, "collect", lambda say: GB10_CPU_TORCH)
    (shown,) = blocks(DOCTORS_PAGE, "text")
    for found in checks:
        words = found.argv[: found.argv.index(">")] if ">" in found.argv else found.argv
        assert doctor.main(words) == doctor.NO_FP8, str(found)
        assert capsys.readouterr().out == shown or words


def test_the_page_of_the_doctor_has_its_exit_codes():
    codes = {int(row[0]) for row in rows(DOCTORS_PAGE, "exit code")}
    assert codes == {0, doctor.NO_FP8, errors.UserError.exit_code, errors.Stopped(2).exit_code}


def test_every_text_is_asked_for_as_shown(first, tmp_path, monkeypatch):
    """Each command of `generate`, on the README's first run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").symlink_to(first.parent)
    (tmp_path / "beginnings.txt").write_text("def\nimport\n")
    asked = [found.argv for found in ALL if found.words[: len(GENERATE)] == GENERATE and "--help" not in found.argv]
    assert len(asked) > 3
    for argv in asked:
        assert generate.main([*argv, "tokens=5"]) == 0
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 8


def test_every_evaluation_is_done_as_shown(first, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/late/fp8").mkdir(parents=True)
    for name in ("first", "late/fp8/seed-1"):
        (tmp_path / "outputs" / name).symlink_to(first)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("a text\n" * 200)
    row = '{"ctx": "def", "endings": ["f", "g"], "label": 0}'
    (tmp_path / "hellaswag_val.jsonl").write_text(row)
    asked = [found.argv for found in ALL if found.words[: len(EVALUATE)] == EVALUATE]
    assert len(asked) > 4
    for argv in asked:
        few = [word for word in argv if word != "data.val_sequences=1000"]
        assert evaluate.main([*few, "data.val_sequences=2"]) == 0
    documented = {name for row in rows(ROOT / "docs/evaluate.md", "printed, and in `out`") for name in names(row[0])}
    written = json.loads((tmp_path / "result.json").read_text()).keys()
    assert documented - {"sources"} == written - {"checkpoint", "data", "asked", "device"}


def test_every_container_runs_what_a_run_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [found.words for found in ALL if found.words[:2] == ["docker", "run"]]
    assert runs
    for words in runs:
        preflight(words[words.index("gpt2_fp8") + 1 :])


def test_python_one_liners_are_python():
    programs = [found.words[2] for found in ALL if found.words[:2] == ["python", "-c"]]
    assert programs
    for program in programs:
        ast.parse(program)


def test_what_is_installed_is_what_the_project_offers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, editable = project["project"]["optional-dependencies"], []
    for found in ALL:
        if found.words[:2] == ["pip", "install"] and "-e" in found.words:
            target = re.fullmatch(r"\.(?:\[(\w+)\])?", found.words[found.words.index("-e") + 1])
            assert target, str(found)
            assert target[1] is None or target[1] in extras, str(found)
            assert (target[1] == "fp8") == ("--no-build-isolation" in found.words), str(found)
            editable.append(target[1])
    assert set(editable) == {None, "test", "fp8", "fa4", "torchao"}
    (torch,) = (line for line in project["project"]["dependencies"] if line.startswith("torch"))
    assert f'pip install "{torch}"' in FP8.read_text()
    (setuptools,) = project["build-system"]["requires"]  # without build isolation, the user's own
    assert f'"{setuptools}"' in FP8.read_text()


def test_ci_runs_the_test_command_of_the_readme():
    (line,) = (line for block in blocks(README, "bash") for line in block.splitlines() if "&& pytest" in line)
    places = [
        re.search(rf"^{re.escape(part)}(?= |$)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
        for part in line.split(" && ")
    ]
    assert all(places)
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The README's first command, of which only the length is changed."""
    cwd = tmp_path_factory.mktemp("first")
    few = ["run_name=first", "trainer.max_steps=3", "optim.warmup_steps=1", "data.val_sequences=4"]
    done = forked(*FIRST.argv, *few, "trainer.val_check_interval=2", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "outputs/first"


def test_the_first_command_logs_what_the_readme_shows(first):
    """Labels and texts; times, folders and numbers are another run's."""
    (shown,) = (block for block in blocks(README, "text") if "mfu" not in block and "] model " in block)

    def labels(text):
        return {match[1] for match in re.finditer(r"^\[[\d:]{8}\] ([a-z]\w*)\b:?", text, re.MULTILINE)}

    written = (first / "run.log").read_text()
    assert labels(shown) - {"gpt2_fp8"} == labels(written), "the fork server has loaded torch before"
    same = [line.partition("] ")[2] for line in shown.splitlines() if re.search(r"\] (model|layers|data|data:) ", line)]
    assert len(same) >= 3
    assert [
        line for line in same if line not in written.replace("4 validation sequences", "64 validation sequences")
    ] == []


def test_the_first_command_leaves_what_the_readme_shows(first):
    (shown,) = (block for block in blocks(README, "text") if block.startswith("outputs/"))
    entries = [re.match(r"( +)(\S+)", line) for line in shown.splitlines()[1:]]
    top = {entry[2].rstrip("/") for entry in entries if entry and len(entry[1]) == 2}
    below = {re.sub(r"\d{8}", "N", entry[2].rstrip("/")) for entry in entries if entry and len(entry[1]) == 4}
    assert top == {path.name for path in first.iterdir()}
    assert below == {re.sub(r"\d{8}", "N", path.name) for path in (first / "checkpoints").iterdir()}


def test_the_metrics_are_those_of_the_page(first):
    documented = {name for row in rows(OUTPUT, "metric") for name in names(row[0])}
    assert documented - ON_A_GPU - OF_AN_OPTION == set(metrics(first)) - {"step"}
    assert documented >= ON_A_GPU | OF_AN_OPTION


def test_the_weights_are_read_as_the_page_shows(first, monkeypatch):
    (program,) = blocks(CHECKPOINTS, "python")
    monkeypatch.chdir(first.parents[1])
    program = program.replace("step-00000300", "step-00000003")
    shape = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint(list(weights['blocks.0.qkv.weight'].shape))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shape.stdout.strip() == "[384, 128]"
    told = re.search(r"A checkpoint is a folder: (.*?) Nothing is pickled", CHECKPOINTS.read_text(), re.DOTALL)
    assert told
    files = {path.name for path in (first / "checkpoints/step-00000003").iterdir()}
    assert set(names(told[1])) == files - {"validation.json"}


def test_the_groups_are_those_of_the_page():
    table = {names(row[0])[0]: set(names(row[1])) for row in rows(SETTINGS, "group")}
    groups = {
        folder.name: {file.stem for file in folder.glob("*.yaml")}
        for folder in conf_dir().iterdir()
        if folder.is_dir() and folder.name != "hydra"  # Hydra's own groups
    }
    assert table == groups


def test_every_key_is_on_the_page():
    """`python -m tests.settings_page` writes it anew."""
    assert settings_page.page() == SETTINGS.read_text()
    shown = {name for group in ("model", "optim", "data") for name in vars(getattr(preflight([])[0], group))}
    assert shown - set(settings_page.CHOSEN) <= set(names(settings_page.table()))


def test_the_defaults_come_first():
    (config,) = preflight([])
    for group, choices, _ in rows(SETTINGS, "group"):
        if (part := getattr(config, names(group)[0], None)) and hasattr(part, "name"):
            assert names(choices)[0] == part.name


def test_the_exit_codes_are_those_of_the_page():
    codes = {int(code) for row in rows(OUTPUT, "exit code") for code in row[0].split(",")}
    ends = {error.exit_code for error in (errors.RunError, errors.UserError, errors.Diverged, errors.DataSourceLost)}
    assert codes == {0} | ends | {errors.Stopped(2).exit_code, errors.Stopped(15).exit_code}


def test_the_summary_is_that_of_the_page():
    documented = [name for row in rows(OUTPUT, "keys") for name in names(row[0])]
    assert sorted(documented) == sorted(
        vars(Summary(precision=Precision(asked="bf16"), recipe=None)).keys() - {"_began"}
    )


def test_the_vocabulary_files_are_those_of_the_page():
    assert {names(name)[0]: names(url)[0] for name, url in rows(DATA, "name in the folder")} == GPT2_FILES


def test_the_mistakes_shown_are_answered_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (shown,) = (block for block in blocks(README, "text") if block.startswith("$ python -m gpt2_fp8.run "))
    typed, _, answer = shown.partition("\n")
    with pytest.raises(errors.UserError) as caught:
        preflight(shlex.split(typed)[1 + len(RUN) :])
    assert str(caught.value) == answer.strip()


def test_the_code_names_the_page_on_fp8():
    assert "docs/fp8.md" in (ROOT / "gpt2_fp8/precision/support.py").read_text()
    assert FP8.exists()


def test_figures_of_the_readme_stand_in_the_measurements():
    measured = README.read_text().partition("## Measured")[2]
    figures = re.findall(r"\d{3},\d{3}", measured)
    assert len(figures) >= 3
    assert [figure for figure in figures if figure not in PERFORMANCE.read_text()] == []


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]  # all that there are, whether their commands are run or not


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if link.startswith("https://"):
            continue
        name, _, place = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not place or place in anchors(target), link


def anchors(document):
    """What a link to a heading of the document may end in."""
    return {anchor(title) for title in re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)}


def anchor(title):
    """What a link to a heading ends in."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_the_contents_of_the_page_on_quality_are_its_headings_in_their_order():
    before, _, sections = QUALITY.read_text().partition("## Contents\n")
    listed = re.findall(r"^( *)- \[(.*)\]\(#(.*)\)$", sections.partition("\n## ")[0], re.MULTILINE)
    headings = re.findall(r"^##(#*) (.*)$", sections, re.MULTILINE)
    assert listed == [("  " * len(depth), title, anchor(title)) for depth, title in headings]
    assert len(listed) > 20
    assert not re.search(r"^## ", before, re.MULTILINE)


def test_every_question_of_the_page_on_numerics_leads_to_its_answer():
    questions = [row[0] for row in rows(NUMERICS, "question")]
    assert len(questions) > 12
    for question in questions:
        assert re.fullmatch(r"\[.*\?\]\((quality\.md)?#[\w-]+\)", question), question


@pytest.mark.parametrize("document", [page for page in DOCUMENTS if page.name != "CHANGELOG.md"], ids=lambda p: p.name)
def test_files_named_exist(document):
    """Every `a/b.py`, `b.yaml` or `b.md` in backticks, but for stand-ins in capitals and what a run makes."""
    for name in names(document.read_text()):
        if re.fullmatch(r"[\w./-]+\.(py|yaml|md)", name) and not re.search(r"[A-Z]{4}\.yaml", name):
            places = [ROOT, ROOT / "gpt2_fp8", *((ROOT / "gpt2_fp8").iterdir() if document == ARCHITECTURE else [])]
            assert any((place / name).is_file() for place in places), name

"""Commands made of what was typed: they compose, they are short, and they continue."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2_fp8.compose import conf_dir, preflight
from gpt2_fp8.config import own_words, sweep_plan
from gpt2_fp8.config.errors import RunError, Stopped
from gpt2_fp8.config.own_words import RUN, TRY_SECONDS, TRY_STEPS, Typed, continued, shorter, twice_as_long
from gpt2_fp8.config.run_length import last_step, limits, tokens_a_step
from tests.test_readme import CHECKPOINTS, FP8, README, RUNS, SETTINGS


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("text\n")


def typed(line):
    return Typed(tuple(shlex.split(line)), Path.cwd())


def words_of(command):
    assert command.startswith(f"{RUN} ")
    return shlex.split(command)[3:]


LINES = [
    "",
    "model=gpt2",
    "model=gpt2 run_name=mine ckpt_path=last trainer.max_tokens=2000000000 trainer.max_time=00:08:00:00",
    "model=gpt2 data=text_files 'data.train_files=[corpus.txt]' trainer.max_epochs=3 trainer.max_steps=null "
    "callbacks.keep_epochs=true",
    "model=gpt2 optim.schedule=warmup_stable_decay optim.decay_steps=3000 optim.warmup_steps=2000",
    "model=gpt2_xl precision.keep_bf16=[blocks.47] micro_batch_size=16 +tags.a=b",
    "trainer=cpu hydra.run.dir=elsewhere model=qwen3_0_6b",
    "model=gpt2 model.n_layer=6 global_batch_size=64 optim.lr=1e-3 seed=3",
    "precision=auto model=gpt2 micro_batch_size=16",
    *(f"experiment={path.stem}" for path in sorted((conf_dir() / "experiment").glob("*.yaml"))),
]


@pytest.mark.whole
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("rate", [0.5, 50.0, 500.0, 20_000.0, 1e9])
def test_a_shorter_command_composes_and_is_short(line, rate):
    """The tiny model's speed is another: a twentieth of the smallest GPT-2's operations a token, or less."""
    (config,) = preflight(shlex.split(line))
    if config.micro_batch_size == "auto":
        config = replace(config, micro_batch_size=1)
    words = words_of(shorter(typed(line), config, rate))
    (short,) = preflight(words)
    assert last_step(short) == TRY_STEPS
    assert not {word.partition("=")[0] for word in words} & {"run_name", "ckpt_path", "hydra.run.dir"}
    if short.model.name == config.model.name:
        too_slow = config.model.name == "tiny" and rate < 1  # nothing is smaller
        assert too_slow or TRY_STEPS * tokens_a_step(short) <= TRY_SECONDS * rate
        assert short.data == config.data
    else:
        assert short.model.name == "tiny"
        assert rate * TRY_SECONDS < TRY_STEPS * config.model.n_positions, "one sequence a step would take too long"


def test_what_was_typed_is_kept():
    line = "-cd mine model=gpt2 seed=3 run_name=x optim.lr=1e-3 'data.train_files=[a b.txt]'"
    (config,) = preflight(["model=gpt2"])
    command = shorter(typed(line), config, 1e9)
    assert (
        command == f"{RUN} -cd mine model=gpt2 seed=3 optim.lr=1e-3 'data.train_files=[a b.txt]' trainer.max_steps=20"
    )


def test_a_run_is_continued_where_it_is(tmp_path):
    line = typed("model=gpt2 run_name=x init_from=y trainer.max_steps=5")
    folder = tmp_path / "outputs/x"
    assert continued(line, folder) == f"{RUN} model=gpt2 trainer.max_steps=5 run_name=x ckpt_path=last"
    longer = continued(line, folder, ["trainer.max_steps=10"])
    assert longer == f"{RUN} model=gpt2 run_name=x ckpt_path=last trainer.max_steps=10"
    assert continued(typed(""), tmp_path / "own place") == f"{RUN} 'hydra.run.dir=own place' ckpt_path=last"


KEPT = ["optim.lr=0.0002", "optim.schedule=constant", "optim.min_lr_ratio=1"]


@pytest.mark.parametrize(
    ("line", "ended_by", "steps", "words"),
    [
        ("", "trainer.max_steps", 300, ["trainer.max_steps=600", *KEPT]),
        ("trainer.max_tokens=409600", "trainer.max_tokens", 100, ["trainer.max_tokens=819200", *KEPT]),
        (
            "trainer.max_tokens=1228800",
            "trainer.max_steps",
            300,
            ["trainer.max_steps=600", "trainer.max_tokens=2457600", *KEPT],
        ),
        ("trainer.max_time=00:15:40:05", "trainer.max_time", 7, ["trainer.max_time=01:07:20:10"]),
        ("trainer.max_epochs=3 trainer.max_steps=null", "trainer.max_epochs", 50, ["trainer.max_epochs=6", *KEPT]),
        (
            "optimizer=muon optimizer.matrix_lr=0.02 optim.schedule=warmup_stable_decay optim.decay_steps=30",
            "trainer.max_steps",
            300,
            ["trainer.max_steps=600", KEPT[0], "optimizer.matrix_lr=0.002", *KEPT[1:], "optim.decay_steps=null"],
        ),
        (" ".join(KEPT), "trainer.max_steps", 300, ["trainer.max_steps=600"]),
        ("optim.min_lr_ratio=0", "trainer.max_steps", 300, ["trainer.max_steps=600"]),  # at a rate of 0
    ],
)
def test_twice_as_long_goes_on(line, ended_by, steps, words):
    (config,) = preflight(shlex.split(line))
    assert twice_as_long(config, ended_by, steps) == words
    (longer,) = preflight(words_of(continued(typed(line), Path.cwd() / "outputs/x", words)))
    assert all(end > steps for end in limits(longer).values())


def test_every_run_of_the_readme_and_its_first_pages_has_a_shorter_one():
    """As far as its files are here."""
    pages = {page.name for page in (README, FP8, SETTINGS, CHECKPOINTS)}
    lines = [command.argv for command in RUNS if command.document in pages]
    assert len(lines) > 10
    for argv in lines:
        if "-m" in argv or any("corpus" in word or word.startswith(("init_from", "-cd")) for word in argv):
            continue
        (config,) = preflight(["model=gpt2", *(word for word in argv if word.startswith("optim."))])
        (short,) = preflight(words_of(shorter(Typed(tuple(argv), Path.cwd()), config, 500.0)))
        assert last_step(short) == TRY_STEPS


@pytest.mark.parametrize(
    ("folder", "saved", "in_sweep", "said"),
    [
        ("outputs/x", True, False, "run_name=x ckpt_path=last continues"),
        ("my runs/x", True, False, "'hydra.run.dir=my runs/x' ckpt_path=last continues"),
        ("outputs/x", False, False, "nothing was saved, and the same command begins again"),
        ("outputs/x/3", True, True, "run_name=x ckpt_path=last continues"),
        ("sweeps/x/3", True, True, "hydra.sweep.dir=sweeps/x ckpt_path=last continues"),
        ("outputs/x/of_a", True, True, "hydra.sweep.dir=outputs/x ckpt_path=last continues"),
        ("outputs/planned/a/3", True, True, "hydra.sweep.dir=outputs/planned ckpt_path=last continues"),
    ],
)
def test_how_a_run_that_has_ended_early_goes_on(tmp_path, folder, saved, in_sweep, said):
    sweep_plan.write(tmp_path / "outputs/planned", [["seed=3"]])
    assert own_words.going_on(tmp_path / folder, tmp_path, saved, in_sweep) == said


def test_a_stopped_run_is_told_once_how_it_goes_on():
    stopped = Stopped(2)
    assert str(stopped) == "stopped by signal 2"
    for _ in range(2):
        stopped.tell("run_name=x ckpt_path=last continues")
    assert str(stopped) == "stopped by signal 2; run_name=x ckpt_path=last continues"
    other = RunError("a fault")
    other.tell("run_name=x ckpt_path=last continues")
    assert str(other) == "a fault"

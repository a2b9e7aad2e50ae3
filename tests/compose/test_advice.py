"""Advice that is followed is taken: no remedy leads to another refusal."""

import re
import shlex
from pathlib import Path

import pytest

from gpt2_fp8.compose import is_help, look_only, preflight
from gpt2_fp8.config import foreign_keys, foreign_values, other_words
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.hints import TWO_SOURCES
from gpt2_fp8.config.keys import key_paths
from gpt2_fp8.config.schema import RunConfig

SWEEPS = Path(__file__).resolve().parents[2] / "docs/sweeps"
SAVED = "outputs/first/checkpoints/step-00000004"  # as last.json says, since the run was rolled back


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("text\n")
    (tmp_path / "a_train_1.bin").write_bytes(bytes(4096))
    for saved in (SAVED, "outputs/first/checkpoints/step-00000008", "exported"):
        (tmp_path / saved).mkdir(parents=True)
        (tmp_path / saved / ("config.json" if saved == "exported" else "manifest.json")).write_text("{}")
    (tmp_path / "outputs/first/checkpoints/last.json").write_text('{"checkpoint": "step-00000004"}')
    (tmp_path / "outputs/none/checkpoints").mkdir(parents=True)


def remedy(line):
    with pytest.raises(UserError) as told:
        preflight(shlex.split(line))
    (problem,) = told.value.problems
    return problem.remedy


BOTH_SOURCES = "+data@data.sources.fineweb=fineweb +data@data.sources.openwebtext=openwebtext"
ONE, OTHER = "+data@data.sources.a", "+data@data.sources.links=openwebtext"
SAME = "+data@data.sources.web=fineweb data.sources.web.tokenizer=bytes"
WEIGHTS = "'data.weights={web: 7, links: 3}'"

# What was typed; a part of the advice; what a person then types.
TYPED = [
    ("use_fp8=true", "precision=fp8_hybrid", "precision=fp8_hybrid"),
    ("+use_fp8=false", "precision=bf16 without it", "precision=bf16"),
    ("num_epochs=3", "trainer.max_epochs", "trainer.max_epochs=3"),
    ("trainer.num_epochs=3", "trainer.max_epochs", "trainer.max_epochs=3"),
    ("data=fineweb epochs=3", "trainer.max_tokens", "data=fineweb trainer.max_tokens=100000000"),
    ("block_size=512", "model.n_positions", "model.n_positions=512"),
    ("+model.block_size=512", "model.n_positions", "model.n_positions=512"),
    ("learning-rate=1e-3", "optim.lr", "optim.lr=1e-3"),
    ("precision=float32", "precision=fp32", "precision=fp32"),
    ("precision=fp16", "precision=bf16", "precision=bf16"),
    ("precision=fp8", "precision=fp8_hybrid", "precision=fp8_hybrid"),
    ("precision=fp8_e5", "precision=fp8_e4m3", "precision=fp8_e4m3"),
    ("+model=gpt2", "model=gpt2, without the +", "model=gpt2"),
    ("+experiment=tinyshakespeare_fp8", "without the +", "experiment=tinyshakespeare_fp8"),
    ("+optim.lr=1e-3", "optim.lr=1e-3, without the +", "optim.lr=1e-3"),
    ("model=gpt2,", "model=gpt2", "model=gpt2"),
    ("model==gpt2", "model=gpt2", "model=gpt2"),
    ("optim.lr=3e-4,", "optim.lr=3e-4", "optim.lr=3e-4"),
    ("tags=[a]", "+tags.a=true", "+tags.a=true"),
    ("model=[gpt2]", "model=gpt2", "model=gpt2"),
    ("precision=[bf16,fp8_hybrid]", "precision=bf16; or -m precision=bf16,fp8_hybrid", "precision=bf16"),
    ("recipe=[]", "leave it out, or choose one of", ""),
    ("data=mixture", TWO_SOURCES, f"data=mixture {TWO_SOURCES}"),
    ("data=mixture data.sources=[a]", TWO_SOURCES, f"data=mixture {TWO_SOURCES}"),
    ("data=mixture data.sources=a", TWO_SOURCES, f"data=mixture {TWO_SOURCES}"),
    ("data=mixture data.sources={a:1}", TWO_SOURCES, f"data=mixture {TWO_SOURCES}"),
    ("data=mixture data.sources=[fineweb,openwebtext]", BOTH_SOURCES, f"data=mixture {BOTH_SOURCES}"),
    (f"data=mixture {ONE}=stdlib", "add +data@data.sources.web=fineweb", f"data=mixture {ONE}=stdlib {SAME}"),
    (f"data=mixture {ONE}=stdlib", "a single one is data=stdlib", "data=stdlib"),
    (f"data=mixture {ONE}=fineweb", "add +data@data.sources.links=openwebtext;", f"data=mixture {ONE}=fineweb {OTHER}"),
    (f"data=mixture {TWO_SOURCES} data.weights=[1,2]", "{web: 7, own: 3}", f"data=mixture {TWO_SOURCES} {WEIGHTS}"),
    (f"data=mixture {TWO_SOURCES} data.weights.web=1", "{web: 7, own: 3}", f"data=mixture {TWO_SOURCES} {WEIGHTS}"),
    ("tags=[a,b]", "+tags.a=true +tags.b=true", "+tags.a=true +tags.b=true"),
    ("max_seq_len=512", "model.n_positions", "model.n_positions=512"),
    ("model=124M", "model=gpt2", "model=gpt2"),
    ("model=small", "model=gpt2", "model=gpt2"),
    ("model=gpt2_small", "model=gpt2", "model=gpt2"),
    ("model=medium", "model=gpt2_medium", "model=gpt2_medium"),
    ("model=XL", "model=gpt2_xl", "model=gpt2_xl"),
    ("corpus.txt", "data=text_files data.train_files='[corpus.txt]'", "data=text_files data.train_files=[corpus.txt]"),
    ("outputs/first", f"ckpt_path={SAVED}", f"ckpt_path={SAVED} run_name=x"),
    ("ckpt_path=outputs/first run_name=x", f"ckpt_path={SAVED}", f"ckpt_path={SAVED} run_name=x"),
    ("ckpt_path=outputs/first/", f"ckpt_path={SAVED}", f"ckpt_path={SAVED} run_name=x"),
    ("init_from=outputs/first", f"init_from={SAVED}", f"init_from={SAVED}"),
    ("ckpt_path=outputs/none", "leave ckpt_path out", ""),
    ("fp8_margin=2", "recipe=delayed recipe.margin=2", "recipe=delayed recipe.margin=2"),
    ("--fp8-amax-history-len=1024", "here it is recipe=delayed recipe.amax_history_len=1024", "recipe=delayed"),
    ("model.untied=true", "model.tied_head=false", "model.tied_head=false"),
    ("disable_bias_linear=true", "model.bias=false", "model.bias=false"),
    ("recompute_granularity=full", "activation_checkpointing=full", "activation_checkpointing=full"),
    ("time_limit=01:56:00", "trainer.max_time=DD:HH:MM:SS", "trainer.max_time=00:01:56:00"),
    ("device=cpu", "trainer=auto, cpu", "trainer=cpu"),
    ("trainer=cuda", "trainer=gpu", "trainer=gpu"),
    ("train", "leave it out", ""),
    ("data=./corpus.txt", "data.train_files='[./corpus.txt]'", "data=text_files 'data.train_files=[./corpus.txt]'"),
    ("data=corpus.txt", "data.train_files='[corpus.txt]'", "data=text_files data.train_files=[corpus.txt]"),
    ("data=shakespeare", "data=tinyshakespeare", "data=tinyshakespeare"),
    (
        "data.train_files=corpus.txt",
        "data=text_files data.train_files='[FILE]'",
        "data=text_files data.train_files=[corpus.txt]",
    ),
    ("optim.name=muon", "optimizer=adamw, adamw_bf16 or muon", "optimizer=muon"),
    ("callbacks.sample_prompt=Hello,world", "as one text 'callbacks", "'callbacks.sample_prompt=\"Hello,world\"'"),
    ("paths.output_dir=/x", "hydra.run.dir=FOLDER", "hydra.run.dir=x"),
    ("trainer.num_sanity_val_steps=0", "leave it out", ""),
    ("ckpt_path=lats", "ckpt_path=last", "ckpt_path=last run_name=x"),
    ("hydra.job.env_set.FOO=bar", "+hydra.job.env_set.FOO=bar", "+hydra.job.env_set.FOO=bar"),
    (
        "trainer.max_steps=5 optim.warmup_steps=10",
        "add optim.warmup_steps=0",
        "trainer.max_steps=5 optim.warmup_steps=0",
    ),
    (
        "trainer.max_steps=5 optim.warmup_steps=10",
        "trainer.max_steps=10 or more",
        "trainer.max_steps=10 optim.warmup_steps=10",
    ),
]


@pytest.mark.parametrize(("line", "advice", "then"), TYPED, ids=[line for line, _, _ in TYPED])
def test_advice_is_taken(line, advice, then):
    assert advice in remedy(line)
    assert len(preflight(shlex.split(then))) == 1


def test_a_source_is_chosen_with_its_keys():
    with pytest.raises(UserError) as told:
        preflight(["data=mixture", "data.sources.a=fineweb", "data.sources.b=openwebtext"])
    words = [problem.remedy.partition(",")[0] for problem in told.value.problems]
    assert len(preflight(["data=mixture", *words[:2]])) == 1


@pytest.mark.parametrize("line", ["exported", "ckpt_path=exported"])
def test_a_hugging_face_folder_is_what_a_run_begins_with(line):
    """Whether its model is the run's is asked next, with the words for that."""
    assert remedy(line).startswith("init_from=exported")


def test_several_numbers_are_no_list_and_no_text():
    assert remedy("optim.lr=1e-3,2e-3") == "-m runs each"


@pytest.mark.parametrize("word", ["help", "bench", "export"])
def test_a_program_is_named(word):
    assert {"help": "gpt2_fp8.run --help"}.get(word, f"python -m gpt2_fp8.{word} is a program") in remedy(word)


def test_your_own_experiment_is_told_where_it_may_stand(tmp_path):
    assert "-cd FOLDER experiment=NAME" in remedy("experiment=mine")
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/my_own.yaml").write_text("# @package _global_\nseed: 2\n")
    (config,) = preflight(["-cd", "mine", "experiment=my_own"])
    assert config.seed == 2


@pytest.mark.parametrize(
    ("line", "then"),
    [
        ("experiment=llama3_small_delayed recipe=current", "recipe=current"),
        ("experiment=llama3_small_tensorwise_first_last precision=bf16", "precision=bf16"),
    ],
)
def test_what_an_experiment_sets_is_not_said_to_be_typed(line, then):
    """A key of its file can be left out with the whole file alone."""
    said = f"or leave {line.split()[0]} out, whose file sets it"
    with pytest.raises(UserError) as shown:
        look_only([*line.split(), "--cfg", "job"])
    assert said in remedy(line)
    assert said in shown.value.problems[0].remedy
    assert len(preflight(then.split())) == 1
    assert len(preflight([*line.split()[:1], remedy(line).partition(",")[0].removeprefix("choose ")])) == 1
    typed = remedy(
        f"{line.split()[1]} precision.keep_bf16=[head]" if "bf16" in line else "recipe=current recipe.margin=1"
    )
    assert re.search(r"leave (precision\.keep_bf16|recipe\.margin) out$", typed)


@pytest.mark.parametrize("group", other_words.CHOICES)
def test_every_choice_from_elsewhere_is_one_of_ours(group):
    for theirs, ours in other_words.CHOICES[group].items():
        assert remedy(f"{group}='{theirs}'") == f"{group}={ours}"
        assert len(preflight([f"{group}={ours}"])) == 1


@pytest.mark.parametrize("group", other_words.OF_A_GROUP)
def test_a_choice_that_is_other_words_here_composes_with_them(group):
    for theirs, (_, words) in other_words.OF_A_GROUP[group].items():
        assert remedy(f"{group}={theirs}") == words
        assert preflight(words.replace("docs/sweeps", str(SWEEPS)).split())


# What a value of an advice needs beside it.
BESIDE = {
    "data.val_files": ["data=text_files", "data.train_files=[corpus.txt]"],
    "optimizer.matrix_lr": ["optimizer=muon"],
    "optimizer.momentum": ["optimizer=muon"],
    "logger.wandb.mode": ["logger=wandb"],
    "ckpt_path": ["run_name=x"],
    "data": ["data.train_files=[corpus.txt]", "data.val_sequences=0"],
    "data.train_files": ["data=text_files"],
    "recipe.amax_compute_algo": ["recipe=delayed"],
    "recipe.amax_history_len": ["recipe=delayed"],
    "recipe.margin": ["recipe=delayed"],
    "model.norm": ["model.bias=false"],
    "model.n_positions": [],
    "model.mlp": ["model.bias=false"],
}


def advised():
    """Every word with a value that a hint about a foreign name consists of, or names first."""
    known = key_paths(RunConfig)
    for _, text in foreign_keys.KEYS.values():
        for word in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)*=(?:'[^']*'|[^\s;']+)", text):
            key, _, value = word.rstrip(",.)").replace("'", "").partition("=")
            if not re.search("[A-Z]", value) and (key in known or "." not in key):
                yield f"{key}={value.rstrip(',')}"


VALUED = [
    *[(name, value) for name in foreign_values._FLAGS for value in ("true", "false")],
    *[(name, value) for name in foreign_values._NUMBERS for value in ("2", "0.5")],
    *[(name, "abc") for name in foreign_values._NAMES],
]


@pytest.mark.parametrize(("name", "value"), VALUED)
def test_a_foreign_key_keeps_its_value_in_words_that_compose(name, value):
    told = remedy(f"{name}={value}")
    assert told == remedy(f"--{name}={value}").removeprefix("keys have no dashes; here it is ")
    words = shlex.split(re.sub(r"\(.*?\)", "", re.split(", | or ", told)[0]))
    if "=" in told:
        assert len(preflight(words)) == 1


@pytest.mark.parametrize("words", ["--local-rank=1", "--local_rank=1", "--local_rank 1"])
def test_what_old_launchers_add_to_the_words_is_the_same_for_every_rank(words):
    """Ranks say once what they all say; with the number in it, it was said by each."""
    with pytest.raises(UserError) as told:
        preflight([*shlex.split(words), "seed=1"])
    (problem,) = told.value.problems
    assert "1" not in problem.cause
    assert problem.remedy.startswith("torchrun in their place")


def test_no_foreign_key_is_told_with_another_number():
    """A number in an advice is the one that was typed, as a whole number or as a part."""
    for name in foreign_keys.KEYS:
        told = [foreign_keys.advice(name, typed)[1] for typed in (3, 0.5)]
        if any(re.search(r"[=:][0-9]", text) for text in told) and name != "enable_checkpointing":
            assert "3" in told[0] or "0.5" in told[1], name


@pytest.mark.parametrize("word", sorted(set(advised())))
def test_a_word_of_a_hint_composes(word):
    words = [*BESIDE.get(word.partition("=")[0], []), word]
    assert len(preflight(words)) == 1


@pytest.mark.parametrize("line", ["--resolve", "--package trainer", "-p trainer seed=1", "-m --resolve seed=1,2"])
def test_a_flag_that_only_says_how_to_show_starts_no_run(line):
    with pytest.raises(UserError) as refused:
        preflight([*line.split(), "trainer=cpu"])
    (problem,) = refused.value.problems
    assert look_only([*problem.remedy.split(), "trainer=cpu"])
    assert is_help(problem.remedy.split())


@pytest.mark.parametrize("line", ["--info --resolve", "--help --package trainer"])
def test_a_flag_that_says_how_to_show_what_is_not_shown_is_refused(line):
    with pytest.raises(UserError, match="--cfg"):
        look_only(line.split())

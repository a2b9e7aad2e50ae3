"""`precision=auto` from the command line to what it settles on: what is measured, what is remembered, and what a run
on a CPU, a resumed run, and the other process of two make of it. The measurement itself is stood in for."""

import json
import logging
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache as cache_calls
from pathlib import Path

import pytest
import torch

from gpt2_fp8.checkpoint.files import read
from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.precision_schema import (
    AutoRecipe,
    DelayedRecipe,
    FP8PrecisionConfig,
    PlainPrecisionConfig,
    StatelessRecipe,
)
from gpt2_fp8.measure import auto_cache, auto_candidates, auto_precision
from gpt2_fp8.measure.case import Case, Result, measure
from gpt2_fp8.precision.choose import Figures
from tests.config.conf_files import merged
from tests.runs import checkpoint, metrics, start_elsewhere, summary, train, train_until
from tests.train.test_ddp import TWO, run, the_run

DELAYED = DelayedRecipe(**merged(Path("recipe/delayed.yaml")))
RATES = {"bf16": 507_000.0, "block": 560_000.0, "current": 640_000.0, "delayed": 703_000.0}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    start_elsewhere(tmp_path, monkeypatch)


class Gpu:
    """A Hopper whose measurements are what `rates` says, but for the Results of `instead`; `cases` were measured."""

    def __init__(self):
        self.name, self.cases, self.rates, self.instead = "NVIDIA H200", [], dict(RATES), {}

    def measure(self, case, timeout_s):
        self.cases.append(case)
        recipe = "bf16" if case.config.precision.name == "bf16" else case.config.recipe.name
        steps, rate = case.steps + case.warmup, self.rates[recipe]
        usual = Result(
            status="ok", ran=case.config.precision.name, tokens_per_second=rate, fastest=rate, slowest=rate,
            losses=[9.0] * steps, grad_norms=[1.0] * steps, peak_memory_gb=26.5, backend="te",
        )  # fmt: skip
        return self.instead.get(recipe, usual)

    @property
    def measured(self):
        """What was measured since this was last read."""
        names = [c.config.precision.name + f"/{c.config.recipe.name}" * (c.config.precision.name != "bf16")
                 for c in self.cases]  # fmt: skip
        self.cases.clear()
        return names


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(auto_precision, "why_not_fp8", lambda: None)
    for module in (auto_precision, auto_candidates):
        monkeypatch.setattr(module, "why_not_recipe", lambda name: "it needs 10.0" if name == "mxfp8" else None)
    monkeypatch.setattr(auto_candidates, "measure", gpu.measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: gpu.name)
    return gpu


ALL = ["bf16", "fp8_hybrid/block", "fp8_hybrid/current", "fp8_hybrid/delayed"]


def settle(*overrides, device="cuda", world_size=1, start=None, rank=0):
    return auto_precision.decide(composed("precision=auto", *overrides), device, world_size, start, rank)


@cache_calls
def composed(*overrides):
    (config,) = preflight(list(overrides))
    return config


def entries():
    return json.loads(auto_cache.place().read_text())["entries"]


# What competes


def test_other_precisions_are_left_alone():
    config = composed("precision=bf16")
    assert auto_precision.decide(config, "cuda", 1, None, 0) == (config, None)


def test_the_fastest_of_what_this_gpu_can_do(gpu):
    config, choice = settle("precision.keep_bf16=[head]", "model.n_layer=3")
    assert config.precision == FP8PrecisionConfig(
        name="fp8_hybrid", keep_bf16=["head"], backend="auto", evaluation="bf16", fast_accumulation=False,
        fallback="allow",
    )  # fmt: skip
    assert config.recipe == DELAYED
    assert config.model.n_layer == 3
    assert choice.reason.startswith("703,000 tokens/s against 507,000 in bf16 (measured on this machine on 20")
    assert choice.reason.endswith("4 candidates)")
    assert gpu.measured == ALL


def test_a_stateless_recipe_can_win(gpu):
    gpu.rates["current"] = 900_000.0
    assert settle()[0].recipe == StatelessRecipe(name="current")


def test_a_named_recipe_alone_competes(gpu):
    config, _ = settle("recipe=delayed", "recipe.margin=1")
    assert gpu.measured == ["bf16", "fp8_hybrid/delayed"]
    assert isinstance(config.recipe, DelayedRecipe)
    assert config.recipe.margin == 1
    gpu.rates["current"] = 1.0
    config, choice = settle("recipe=current")
    assert config.precision == PlainPrecisionConfig(name="bf16", backend="auto")
    assert "507,000 tokens/s against 1 in fp8_hybrid, recipe current" in choice.reason


def test_delayed_scaling_competes_as_it_is_set(gpu):
    settle("recipe.delayed.margin=2", "recipe.delayed.amax_history_len=4")
    assert gpu.cases[-1].config.recipe == replace(DELAYED, margin=2, amax_history_len=4)


@pytest.mark.parametrize(
    ("override", "again"),
    [
        ("optim.lr=0.1", False),
        ("optim.warmup_steps=3", False),
        ("optim.schedule=linear", False),
        ("trainer.max_tokens=1000000", False),
        ("optim.beta2=0.9", True),
        ("optim.eps=1e-6", True),
    ],
)
def test_figures_are_those_of_the_runs_optimizer_at_one_rate(gpu, override, again):
    settle()
    gpu.cases.clear()
    settle(override)
    assert gpu.measured == (ALL if again else [])


def test_what_is_measured_is_the_runs_own_shape_and_nothing_else_of_it(gpu):
    settle(
        "model=gpt2", "data=fineweb", "micro_batch_size=8", "global_batch_size=64", "trainer=ddp", "seed=3",
        "trainer.deterministic=true", "compile=false", world_size=2,
    )  # fmt: skip
    for case in gpu.cases:
        config = case.config
        assert (config.model.n_layer, config.model.n_embd, config.model.vocab_size) == (12, 768, 50257)
        assert (config.micro_batch_size, config.global_batch_size) == (8, 16)
        assert (config.data.kind, config.data.tokenizer, config.trainer.devices) == ("stdlib", "bytes", 1)
        assert (config.trainer.deterministic, config.compile, config.optim.lr) == (True, False, 3e-4)
        assert getattr(config.precision, "fallback", "error") == "error", "bf16 is not to be taken for FP8"
        assert config.trainer.max_steps == case.steps + case.warmup
    assert len(gpu.cases) == 4
    settle("global_batch_size=16", "micro_batch_size=16")
    assert {case.config.global_batch_size for case in gpu.cases[4:]} == {16}


@pytest.mark.parametrize(
    ("cuda_graphs", "world_size", "measured"), [("auto", 1, "auto"), ("auto", 2, "auto"), ("false", 1, False)]
)
def test_graphs_are_measured_only_where_the_run_has_them(gpu, cuda_graphs, world_size, measured):
    settle(f"cuda_graphs={cuda_graphs}", "micro_batch_size=8", world_size=world_size)
    assert [case.config.cuda_graphs for case in gpu.cases] == [measured] * len(ALL)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (Result(status="out of memory"), "recipe delayed is out: out of memory"),
        (Result(status="failed", message="SIGSEGV"), "recipe delayed is out: failed: SIGSEGV"),
        (Result(status="ok", ran="bf16", reason="no FP8"), "recipe delayed is out: it ran in bf16: no FP8"),
        (Result(status="ok", ran="fp8_hybrid"), "recipe delayed is out: it gave no figures"),
    ],
    ids=["memory", "crash", "fallback", "nothing"],
)
def test_a_candidate_that_cannot_run_is_out_and_said_so(gpu, result, words):
    gpu.instead["delayed"] = result
    config, choice = settle()
    assert config.recipe.name == "current"
    assert words in choice.reason


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["model.n_embd=100"], "multiples of 16"),
        (["model.n_positions=40", "micro_batch_size=2"], "multiples of 16"),  # 80 tokens a pass, 40 in a sample
        (["recipe=mxfp8"], "recipe=mxfp8 cannot run on this GPU: it needs 10.0"),
    ],
)
def test_where_fp8_cannot_compute_the_model_it_is_bf16_unmeasured(gpu, overrides, why):
    config, choice = settle(*overrides)
    assert config.precision == PlainPrecisionConfig(name="bf16", backend="auto")
    assert why in choice.reason
    assert gpu.measured == []


def test_a_recipe_that_cannot_take_the_models_widths_does_not_compete(gpu, monkeypatch):
    """Blackwell's: mxfp8 needs multiples of 32, the others of 16."""
    for module in (auto_precision, auto_candidates):
        monkeypatch.setattr(module, "why_not_recipe", lambda name: None)
    gpu.rates["mxfp8"] = gpu.rates["block"]
    settle("model.n_embd=144", "model.n_head=3")
    assert gpu.measured == ALL
    config, choice = settle("recipe=mxfp8", "model.n_embd=144", "model.n_head=3")
    assert (config.precision.name, gpu.measured) == ("bf16", [])
    assert "multiples of 32" in choice.reason
    settle("model.n_embd=160")
    assert gpu.measured == [ALL[0], "fp8_hybrid/mxfp8", *ALL[1:]]


def test_a_gpu_without_fp8_and_a_cpu_measure_nothing(gpu, monkeypatch):
    monkeypatch.setattr(auto_precision, "why_not_fp8", lambda: "the card is too old")
    config, choice = settle()
    assert (config.precision.name, choice.reason) == ("bf16", "the card is too old")
    config, choice = settle("trainer=cpu", device="cpu")
    assert (config.precision.name, choice.reason) == ("fp32", "the CPU has no FP8 matrix units")
    assert not isinstance(config.recipe, AutoRecipe)
    assert gpu.measured == []
    assert not auto_cache.place().exists()


def test_a_debug_run_measures_nothing_but_takes_what_is_known(gpu):
    config, choice = settle("debug=fdr")
    assert (config.precision.name, config.recipe.name) == ("fp8_hybrid", "delayed")
    assert "fast_dev_run" in choice.reason
    assert gpu.measured == []
    gpu.rates["delayed"] = gpu.rates["block"] = gpu.rates["current"] = 1.0
    settle()
    assert settle("debug=fdr")[0].precision.name == "bf16"


# What is remembered


def test_what_was_measured_is_not_measured_again(gpu):
    _, choice = settle()
    assert gpu.measured == ALL
    config, again = settle("seed=7", "optim.lr=0.1", "trainer.max_steps=77", "callbacks.sample_tokens=0")
    assert gpu.measured == []
    assert again == choice
    assert config.seed == 7


def test_the_decision_is_made_anew(gpu):
    settle()
    for entry in (content := json.loads(auto_cache.place().read_text()))["entries"].values():
        entry["figures"][3]["losses"] = [9.5] * 15
    auto_cache.place().write_text(json.dumps(content))
    assert settle()[0].recipe.name == "current"
    assert settle("precision.tolerance=0.1")[0].recipe.name == "delayed"
    assert gpu.measured == ALL, "once"


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.n_layer=3"], ["model.n_head=2"], ["model.n_embd=256"], ["model.n_positions=64"],
        ["model.vocab_size=300"], ["model.bias=false"], ["model.dropout=0.1"], ["micro_batch_size=8"],
        ["precision.keep_bf16=[head]"], ["compile=false"], ["recipe=delayed"], ["trainer.deterministic=true"],
        ["data.tokenizer=gpt2"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_speed_depends_on_is_measured_for_itself(gpu, overrides):
    settle()
    assert gpu.measured
    settle(*overrides)
    assert gpu.measured
    assert len(entries()) == 2
    settle(*overrides)
    settle()
    assert gpu.measured == []


def test_another_gpu_and_another_version_are_other_keys(gpu, monkeypatch):
    settle()
    gpu.name = "NVIDIA H100 80GB HBM3"
    settle()
    versions = auto_candidates.versions()
    monkeypatch.setattr(auto_candidates, "versions", lambda: versions | {"transformer_engine": "9.9"})
    settle()
    assert len(gpu.measured) == 12
    monkeypatch.setattr(auto_candidates, "versions", lambda: versions | {"python": "9.9"})
    settle()
    assert gpu.measured == []
    monkeypatch.setattr(auto_candidates, "source_digest", lambda: "0123456789ab")
    settle()
    assert len(gpu.measured) == 4, "another commit may be faster, or slower"


def test_another_machine_with_the_same_home_measures_for_itself(gpu, monkeypatch):
    settle()
    monkeypatch.setattr(platform, "node", lambda: "another")
    settle()
    assert gpu.measured == ALL * 2
    assert len(entries()) == 2


def test_all_that_is_stored_at_once_is_kept(monkeypatch, caplog):
    """Every one reads before any has written, unless they take turns."""
    together, read = threading.Barrier(8), auto_cache._entries

    def read_and_wait():
        found = read()
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)
        return found

    monkeypatch.setattr(auto_cache, "_entries", read_and_wait)
    figures = [Figures(precision="bf16", recipe=None, tokens_per_second=1.0)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: auto_cache.store({"run": number}, "2026-01-01", figures), range(8)))
    assert sorted(entry["key"]["run"] for entry in entries().values()) == list(range(8))
    assert "cannot be written" not in caplog.text
    assert {path.name for path in auto_cache.place().parent.iterdir()} == {"auto.json", "auto.lock"}


def test_a_write_that_fails_leaves_what_was_there(gpu, monkeypatch):
    settle()
    before = auto_cache.place().read_text()
    monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    settle("model.n_layer=3")
    assert auto_cache.place().read_text() == before
    assert {path.name for path in auto_cache.place().parent.iterdir()} == {"auto.json", "auto.lock"}


DAMAGE = {
    "half a file": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no text": lambda text: b"\xff\xfe\x00",
    "somebody else's": lambda text: '{"format": "other", "entries": {}}',
    "a list": lambda text: "[1, 2]",
    "a number too few": lambda text: text.replace('"fastest"', '"fast"'),
    "words for numbers": lambda text: text.replace("703000.0", '"many"'),
    "another key": lambda text: text.replace('"n_layer": 4', '"n_layer": 5'),
    "no figures": lambda text: text.replace('"figures"', '"numbers"'),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_said_ignored_and_replaced(gpu, what, caplog):
    settle()
    good = auto_cache.place().read_text()
    bad = DAMAGE[what](good)
    auto_cache.place().write_bytes(bad if isinstance(bad, bytes) else bad.encode())
    assert gpu.measured
    assert settle()[0].recipe.name == "delayed"
    assert gpu.measured == ALL
    assert "auto.json" in caplog.text
    assert auto_cache.place().read_text() == good
    settle()
    assert gpu.measured == []


@pytest.mark.parametrize("where", ["a file stands there", "the file is a folder"])
def test_a_cache_that_cannot_be_written_costs_a_warning(gpu, where, caplog):
    folder = auto_cache.place().parent
    folder.parent.mkdir()
    folder.write_text("") if where == "a file stands there" else auto_cache.place().mkdir(parents=True)
    assert settle()[0].recipe.name == "delayed"
    assert "cannot be written, so the next run measures again" in caplog.text
    gpu.cases.clear()
    settle()
    assert gpu.measured == ALL


def test_numbers_that_are_not_finite_are_kept_as_such(gpu):
    usual = gpu.measure(Case(config=composed("precision=bf16"), steps=10, warmup=5), 0)
    gpu.instead["delayed"] = replace(usual, ran="fp8_hybrid", losses=[float("nan")] * 15)
    gpu.cases.clear()
    for _ in range(2):
        config, choice = settle()
        assert config.recipe.name == "current"
        assert "its loss is not finite in step 1" in choice.reason
    assert gpu.measured == ALL, "once"


@pytest.mark.parametrize(
    ("recipe", "status", "kept"),
    [("bf16", "failed", False), ("delayed", "timed out", False), ("delayed", "failed", False),
     ("delayed", "refused", True)],
)  # fmt: skip
def test_faults_of_the_moment_are_not_remembered(gpu, recipe, status, kept):
    gpu.instead[recipe] = Result(status=status, message="x")
    settle()
    assert auto_cache.place().exists() == kept


@pytest.mark.parametrize(("recipe", "name"), [("bf16", "bf16"), ("delayed", "fp8_hybrid/delayed")])
def test_what_ran_out_of_memory_is_measured_again_and_it_alone(gpu, recipe, name):
    """Another process may have held the GPU's memory."""
    gpu.instead[recipe] = Result(status="out of memory")
    _, choice = settle()
    assert choice.reason.endswith("4 candidates; those out of memory are measured again next time)")
    assert gpu.measured == ALL
    assert settle()[1].reason == choice.reason
    assert gpu.measured == [name]
    gpu.instead.clear()
    config, choice = settle()
    assert gpu.measured == [name]
    assert (config.recipe.name, [c.recipe for c in choice.candidates]) == (
        "delayed",
        [None, "block", "current", "delayed"],
    )
    assert "memory" not in choice.reason
    settle()
    assert gpu.measured == []


def test_where_nothing_had_memory_nothing_is_kept(gpu):
    gpu.instead = dict.fromkeys(RATES, Result(status="out of memory"))
    settle()
    assert not auto_cache.place().exists()


def test_the_cache_is_where_the_system_says(monkeypatch, tmp_path):
    assert auto_cache.place() == tmp_path / "cache/gpt2_fp8/auto.json"
    for unset in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        monkeypatch.setenv("HOME", "/home/someone")
        assert auto_cache.place() == Path("/home/someone/.cache/gpt2_fp8/auto.json")


# Several processes


def test_another_rank_takes_what_rank_0_found(gpu):
    settle(world_size=2)
    assert gpu.measured == ALL
    auto_cache.place().unlink()
    gpu.rates["delayed"] = 1.0
    config, choice = settle(world_size=2, rank=1)
    assert gpu.measured == []
    assert (config.precision.name, config.recipe) == ("fp8_hybrid", DELAYED)
    assert choice.precision == "fp8_hybrid"
    assert settle("model.n_layer=2")[0].recipe.name == "current", "rank 0 of the next run of a sweep decides itself"


BY_SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("variables", [BY_HAND, BY_SRUN])
@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_something_else_starts_are_refused(gpu, monkeypatch, variables, rank):
    for name, value in variables.items():
        monkeypatch.setenv(name, value if value != "1" else str(rank))
    with pytest.raises(UserError, match=r"(?s)before the others start.*precision=NAME recipe=NAME"):
        settle("trainer=ddp", "trainer.devices=2", "global_batch_size=32", world_size=2, rank=rank)
    for name in variables:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert settle("trainer.devices=1")[1], "one process of an allocation of many"


def test_several_nodes_are_refused_where_there_is_something_to_measure(gpu, monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    nodes = ["trainer.num_nodes=2", "global_batch_size=32", "run_name=run"]
    with pytest.raises(UserError, match="several nodes"):
        settle(*nodes, world_size=2)
    monkeypatch.setattr(auto_precision, "why_not_fp8", lambda: "the card is too old")
    assert settle(*nodes, world_size=2)[0].precision.name == "bf16"


BF16_BY_RANK_0 = """
from gpt2_fp8.measure import auto_precision
from gpt2_fp8.precision.choose import Choice

def choose(*_):
    with Path("chose").open("a") as file:
        file.write("once\\n")
    return Choice(precision="bf16", recipe=None, reason="a stand-in says so")

auto_precision._choose = choose

begin = GPT2Module.on_train_start

def on_train_start(self):
    begin(self)
    Path(f"ran-{self.global_rank}").write_text(f"{self.step.plan.asked} {self.step.plan.ran}")

GPT2Module.on_train_start = on_train_start
"""


def test_two_processes_train_in_what_one_chose(tmp_path):
    code, output = run(tmp_path, *TWO, "precision=auto", "trainer.max_steps=2", patch=BF16_BY_RANK_0)
    assert code == 0, output
    assert (tmp_path / "chose").read_text() == "once\n"
    assert {(tmp_path / f"ran-{rank}").read_text() for rank in (0, 1)} == {"auto bf16"}
    assert output.count("precision  bf16: a stand-in says so") == 1
    assert summary(the_run(tmp_path))["precision"]["ran"] == "bf16"


# Whole runs


def test_a_candidate_is_one_that_the_measurement_takes(gpu, monkeypatch):
    """The real measurement, on the CPU, of the real candidate but for its device."""
    cases = auto_candidates.candidates(composed("precision=auto", "model.n_layer=1", "micro_batch_size=2"), 1)
    on_a_cpu = replace(cases[0], trainer=replace(cases[0].trainer, accelerator="cpu"), compile=False)
    result = measure(Case(config=on_a_cpu, steps=2, warmup=1), 120)
    assert (result.status, result.message, result.ran) == ("ok", None, "bf16")
    assert len(result.losses) == len(result.grad_norms) == 3
    assert result.tokens_per_second > 0
    assert auto_candidates._figures(on_a_cpu, result).problem is None


def test_a_run_on_a_cpu_says_what_and_why(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(tmp_path / "run", "precision=auto")
    report = summary(tmp_path / "run")
    assert report["status"] == "completed"
    told = report["precision"]
    assert (told["asked"], told["ran"], told["reason"]) == ("auto", "fp32", "the CPU has no FP8 matrix units")
    assert told["choice"]["candidates"] == []
    assert report["recipe"] is None
    assert "precision  fp32: the CPU has no FP8 matrix units" in caplog.text
    assert "instead of" not in caplog.text
    saved = read(checkpoint(tmp_path / "run", 12))["precision"]
    assert (saved["asked"], saved["ran"], saved["reason"]) == ("auto", "fp32", "the CPU has no FP8 matrix units")


def test_a_run_that_measured_tells_of_all_that_competed(tmp_path, gpu, monkeypatch, caplog):
    """On a CPU that is taken for a GPU, where bf16 wins."""
    caplog.set_level(logging.INFO)
    gpu.rates["bf16"] = 800_000.0
    monkeypatch.setattr(auto_precision, "_why_not", lambda *_: None)
    train(tmp_path / "run", "precision=auto")
    told = summary(tmp_path / "run")["precision"]
    assert (told["asked"], told["ran"]) == ("auto", "bf16")
    rates = {entry["recipe"]: entry["tokens_per_second"] for entry in told["choice"]["candidates"]}
    assert rates == {None: 800_000.0, "block": 560_000.0, "current": 640_000.0, "delayed": 703_000.0}
    assert told["choice"]["measured_on"] in told["reason"]
    line = "precision  bf16: 800,000 tokens/s against 703,000 in fp8_hybrid, recipe delayed (measured on this machine"
    assert line in caplog.text


def test_a_resumed_run_stays_with_what_it_ran_in(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train_until(4, tmp_path / "run", "precision=bf16")
    train(tmp_path / "run", "precision=auto", "ckpt_path=last")
    told = summary(tmp_path / "run")["precision"]
    assert (told["asked"], told["ran"]) == ("auto", "bf16")
    assert "precision  bf16: what the checkpoint was trained in" in caplog.text
    assert list(metrics(tmp_path / "run")["train_loss"]) == list(range(1, 13))


def test_a_sweep_measures_once(gpu):
    for config in preflight(["-m", "precision=auto", "seed=1,2,3"]):
        auto_precision.decide(config, "cuda", 1, None, 0)
    assert gpu.measured == ALL


SAVED = [
    ({"ran": "fp8_hybrid", "recipe": "block"}, {}, [], "fp8_hybrid", "block"),
    ({"ran": "fp8_e4m3", "recipe": "delayed"}, {}, [], "fp8_e4m3", "delayed"),
    ({"ran": "fp8_hybrid"}, {"scaling": "fp8_hybrid, ..."}, [], "fp8_hybrid", "delayed"),
    ({"ran": "fp8_hybrid"}, {}, [], "fp8_hybrid", "current"),
    ({"ran": "fp8_hybrid", "recipe": "block"}, {}, ["recipe=current"], "fp8_hybrid", "current"),
    ({"ran": "bf16", "recipe": None}, {}, ["recipe=current"], "bf16", "current"),
    ({"ran": "fp32", "recipe": None}, {}, [], "fp32", "delayed"),
]


@pytest.mark.parametrize(("precision", "plugin", "overrides", "ran", "recipe"), SAVED)
def test_what_a_checkpoint_says_it_ran_in(gpu, tmp_path, precision, plugin, overrides, ran, recipe):
    (tmp_path / "state.json").write_text(json.dumps({"precision": precision, "FP8Precision": plugin}))
    config, choice = settle(*overrides, start=tmp_path)
    assert (config.precision.name, config.recipe.name) == (ran, recipe)
    assert "checkpoint" in choice.reason
    assert gpu.measured == []

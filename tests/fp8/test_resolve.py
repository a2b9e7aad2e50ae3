"""What runs where, with torch's and Transformer Engine's answers replaced."""

import logging
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config.backend_support import WHY_NOT
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import AutoRecipe, DelayedRecipe, FP8PrecisionConfig, PlainPrecisionConfig, StatelessRecipe
from gpt2_fp8.fp8 import backends, support
from gpt2_fp8.fp8 import resolve as resolving
from gpt2_fp8.fp8.backends import SMALL_TOKENS
from gpt2_fp8.fp8.recipes import delayed_scaling
from gpt2_fp8.fp8.resolve import resolve
from gpt2_fp8.layers import attention
from gpt2_fp8.train import setup

POSITIONS = 1024
DELAYED = DelayedRecipe(name="delayed", margin=0, amax_history_len=16, amax_compute_algo="max")
RECIPES = {"delayed": DELAYED, "auto": AutoRecipe(name="auto", delayed=DELAYED)}


@pytest.fixture(scope="module")
def base():
    (composed,) = compose.preflight(["model=gpt2"])
    assert (composed.model.n_positions, composed.cuda_graphs) == (POSITIONS, "auto")
    return composed


@pytest.fixture
def config(base):
    """A run's configuration, from what is to differ from GPT-2 124M in 64 sequences a micro-batch."""

    def build(
        precision="fp8_hybrid", fallback="allow", recipe="delayed", backend="auto", dropout=0.0, micro_batch_size=64,
        trainer=None, fast=False, **keys,
    ):  # fmt: skip
        chosen = PlainPrecisionConfig(name=precision, backend=backend)
        if precision.startswith("fp8"):
            chosen = FP8PrecisionConfig(
                name=precision, keep_bf16=[], backend=backend, fast_accumulation=fast, fallback=fallback,
            )  # fmt: skip
        return replace(
            base, precision=chosen, recipe=RECIPES.get(recipe) or StatelessRecipe(name=recipe),
            model=replace(base.model, dropout=dropout), trainer=replace(base.trainer, **(trainer or {})),
            micro_batch_size=micro_batch_size, **keys,
        )  # fmt: skip

    return build


def gpu(monkeypatch, capability, name):
    monkeypatch.setattr(resolving, "why_not_te_fp8", lambda: None)
    monkeypatch.setattr(
        resolving, "why_not_recipe", lambda name: "it needs compute capability 10.0" if name == "mxfp8" else None
    )
    monkeypatch.setattr(backends, "why_no_transformer_engine", lambda: None)
    monkeypatch.setattr(backends.nvrtc, "why_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)


@pytest.fixture
def hopper(monkeypatch):
    gpu(monkeypatch, (9, 0), "NVIDIA H200")


@pytest.fixture
def ada(monkeypatch):
    """A GPU with FP8 units, without Transformer Engine, and with torchao."""
    gpu(monkeypatch, (8, 9), "NVIDIA L40S")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends.Torchao, "torch_attention", lambda self: "torch's")
    for module in (resolving, backends):
        monkeypatch.setattr(module, "why_not_te_fp8", lambda: "Transformer Engine is not installed")


def without_torchao(monkeypatch):
    monkeypatch.setattr(support.torchao, "why_not", lambda: "torchao is not installed")


def refusal(config, device="cuda"):
    with pytest.raises(UserError) as caught:
        resolve(config, device)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.usefixtures("hopper")
def test_recipe_the_gpu_cannot_do_is_refused(config):
    problem = refusal(config(recipe="mxfp8"))
    assert problem.cause.startswith("recipe=mxfp8 cannot run on this GPU: it needs compute capability 10.0")


def test_gpu_without_fp8_falls_back_to_compiled_bf16(config, monkeypatch):
    monkeypatch.setattr(resolving, "why_not_te_fp8", lambda: "the card is too old")
    monkeypatch.setattr(resolving, "why_no_fp8_units", lambda: "the card is too old")
    plan = resolve(config(), "cuda")
    assert (plan.ran, plan.reason) == ("bf16", "the card is too old")
    assert (plan.backend.name, plan.backend.compiled) == ("reference", True)


def test_cpu_falls_back_to_fp32_and_says_why(config):
    plan = resolve(config(trainer={"accelerator": "cpu"}), "cpu")
    assert (plan.ran, plan.backend.name) == ("fp32", "reference")
    assert (plan.backend.compiled, plan.backend.graphs) == (False, False)
    assert "CPU" in plan.reason


def test_fallback_error_is_refused_with_the_reason(config):
    problem = refusal(config(fallback="error", trainer={"accelerator": "cpu"}), "cpu")
    assert "cannot run here: the CPU" in problem.cause
    assert "precision.fallback=allow trains in fp32" in problem.remedy


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plain_precisions_run_as_asked(config, precision):
    plan = resolve(config(precision), "cpu")
    assert (plan.ran, plan.reason) == (precision, None)
    assert resolve(config(precision, compile=True), "cpu").backend.compiled


# Layers

LAYERS = [
    # asked, recipe, dropout -> layers on a Hopper GPU
    ("auto", "delayed", 0.0, "fused"),
    ("auto", "delayed", 0.1, "te"),
    ("auto", "current", 0.0, "te"),
    ("auto", "block", 0.0, "te"),
    ("fused", "delayed", 0.0, "fused"),
    ("te", "delayed", 0.0, "te"),
    ("te", "current", 0.1, "te"),
]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("asked", "recipe", "dropout", "expected"), LAYERS)
@pytest.mark.parametrize("precision", ["fp8_hybrid", "fp8_e4m3"])
def test_layers_on_hopper(config, precision, asked, recipe, dropout, expected):
    plan = resolve(config(precision, backend=asked, recipe=recipe, dropout=dropout), "cuda")
    assert (plan.ran, plan.backend.name, plan.reason, plan.backend.compiled) == (precision, expected, None, False)
    assert plan.fp8


@pytest.mark.parametrize(("capability", "name"), [((8, 9), "NVIDIA L40S"), ((10, 0), "NVIDIA B200")])
def test_other_generations_have_transformer_engines_layers(config, monkeypatch, capability, name):
    gpu(monkeypatch, capability, name)
    chosen = resolve(config(), "cuda").backend
    assert chosen.name == "te"
    said = f"not the fused ones: their kernels are made for Hopper, and this is {name}"
    assert said in chosen.kernels(50257)["layers"]
    problem = refusal(config(backend="fused"))
    assert problem.cause.startswith("precision.backend=fused cannot run here: ")
    assert "made for Hopper" in problem.cause
    assert name in problem.cause
    assert problem.remedy == "precision.backend=auto"


@pytest.mark.usefixtures("hopper")
def test_without_cuda_core_there_are_no_fused_layers_and_the_log_says_so(config, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(backends.nvrtc, "why_missing", lambda: "cuda-core is not installed")
    problem = refusal(config(backend="fused"))
    assert problem.cause == "precision.backend=fused cannot run here: cuda-core is not installed"
    assert problem.remedy == "precision.backend=auto"
    plan = resolve(config(), "cuda")
    layers = plan.backend.kernels(50257)["layers"]
    assert layers == "Transformer Engine, not the fused ones: cuda-core is not installed"
    assert plan.slower() == "cuda-core is not installed", "the line is a warning: this can be mended"
    with caplog.at_level(logging.INFO):
        setup.announce(config(), plan, 50257, 1, tmp_path, None)
    (said,) = (record for record in caplog.records if record.getMessage().startswith("layers "))
    assert said.levelno == logging.WARNING
    assert said.getMessage().count("cuda-core is not installed") == 1
    assert resolve(config(backend="te"), "cuda").slower() is None
    fast = refusal(config(fast=True))
    assert "the fused layers' own, and they cannot run here: cuda-core is not installed" in fast.cause


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("n_embd", "expected"), [(4096, "fused"), (4608, "te")])
def test_rows_wider_than_a_block_of_threads_takes_are_transformer_engines(config, n_embd, expected):
    run = config()
    backend = resolve(replace(run, model=replace(run.model, n_embd=n_embd, n_head=32)), "cuda").backend
    assert backend.name == expected
    if expected == "te":
        said = "not the fused ones: they normalise at most 4,096 channels, and this is model.n_embd=4608"
        assert said in backend.kernels(50257)["layers"]


OPTIONS = {
    "dropout, and model.dropout=0.1": {"dropout": 0.1}, "SwiGLU MLP": {"mlp": "swiglu"},
    "grouped-query attention": {"n_kv_head": 4},
    "SwiGLU MLP, no grouped-query attention": {"n_kv_head": 4, "mlp": "swiglu", "positions": "rope"},
}  # fmt: skip


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("lacking", OPTIONS)
def test_an_option_that_the_fused_layers_lack_takes_transformer_engine_and_says_so(config, lacking):
    def asked(backend):
        run = config(backend=backend)
        return replace(run, model=replace(run.model, **OPTIONS[lacking]))

    problem = refusal(asked("fused"))
    assert problem.cause == f"precision.backend=fused cannot run here: they have no {lacking}"
    assert problem.remedy == "precision.backend=auto"
    chosen = resolve(asked("auto"), "cuda").backend
    assert chosen.name == "te"
    attention = {"attention": "Transformer Engine's choice"}
    said = f"Transformer Engine, not the fused ones: they have no {lacking}"
    assert chosen.kernels(50257) == {"layers": said} | attention
    assert resolve(asked("te"), "cuda").backend.kernels(50257) == {"layers": "Transformer Engine"} | attention


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("keys", "before"),
    [
        ({"mlp_width": 640}, ""), ({"norm_epsilon": 1e-6}, ""), ({"n_kv_head": 12, "head_size": 64}, ""),
        ({"head_size": 128}, ""), ({"norm": "rms_norm"}, ""), ({"bias": False}, ""), ({"tied_head": False}, ""),
        ({"mlp": "relu_squared"}, ""),
        ({"positions": "rope"}, "RoPE"), ({"positions": "rope", "rope_scaling": 8.0}, "RoPE"),
        ({"qk_norm": True}, "QK-norm"), ({"qk_norm": True, "positions": "rope", "bias": False}, "QK-norm and RoPE"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_fused_layers_can_compute_they_do(config, monkeypatch, keys, before):
    """And the log says of attention what is done before it."""
    monkeypatch.setattr(attention, "why_no_flash", lambda: None)
    run = config()
    backend = resolve(replace(run, model=replace(run.model, **keys)), "cuda").backend
    assert backend.name == "fused"
    told = "cuDNN forward, FlashAttention 4 backward" + (f", after {before} in Triton" if before else "")
    assert backend.kernels(50257)["attention"] == told


def test_where_fp8_cannot_run_the_layers_asked_for_are_not_refused(config):
    """`precision.fallback` decides there, as for the precision itself."""
    assert resolve(config(backend="fused", trainer={"accelerator": "cpu"}), "cpu").backend.name == "reference"


def test_settings_of_the_fused_layers_are_the_recipes(config):
    recipe = DelayedRecipe(name="delayed", margin=2, amax_history_len=8, amax_compute_algo="most_recent")
    hybrid = delayed_scaling(config("fp8_hybrid").precision, recipe)
    assert (hybrid.history, hybrid.margin, hybrid.most_recent) == (8, 2, True)
    assert (hybrid.forward, hybrid.gradient) == (torch.float8_e4m3fn, torch.float8_e5m2)
    e4m3 = delayed_scaling(config("fp8_e4m3").precision, DELAYED)
    assert (e4m3.history, e4m3.margin, e4m3.most_recent) == (16, 0, False)
    assert (e4m3.forward, e4m3.gradient) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert not hybrid.fast_accumulation
    assert delayed_scaling(config(fast=True).precision, DELAYED).fast_accumulation


def test_fast_accumulation_is_refused_where_the_fused_layers_cannot_run(config, monkeypatch):
    gpu(monkeypatch, (8, 9), "NVIDIA L4")
    assert resolve(config(), "cuda").backend.name == "te"
    problem = refusal(config(fast=True))
    assert problem.cause.startswith("precision.fast_accumulation=true is the fused layers' own, and they cannot run")


# Emulated


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fallback", ["allow", "error"])
@pytest.mark.parametrize("precision", ["fp8_hybrid", "fp8_e4m3"])
def test_emulated_fp8_runs_anywhere_and_is_no_fallback(config, monkeypatch, precision, fallback, device):
    gpu(monkeypatch, (8, 0), "NVIDIA A100")
    monkeypatch.setattr(resolving, "why_not_te_fp8", lambda: "the card is too old")
    plan = resolve(config(precision, backend="emulated", fallback=fallback), device)
    assert (plan.asked, plan.ran, plan.reason, plan.fell_back) == (precision, precision, None, False)
    assert (plan.backend.name, plan.recipe, plan.fp8) == ("emulated", "delayed", True)
    assert not plan.backend.compiled, "this GPU has no conversion to FP8"


@pytest.mark.parametrize(("recipe", "scaled"), [("delayed", True), ("current", False), ("block", False)])
def test_emulated_layers_have_the_recipe_and_the_formats(config, recipe, scaled):
    made = resolve(config("fp8_e4m3", backend="emulated", recipe=recipe), "cpu").backend
    family = made.family()
    assert (family.how.recipe, family.scales is not None) == (recipe, scaled)
    assert family.how.forward == family.how.gradient == torch.float8_e4m3fn
    assert made.kernels(257) == {"layers": "FP8 emulated in plain torch", "attention": "torch's flash kernel"}


def test_emulated_layers_are_compiled_on_a_gpu_that_converts(config, monkeypatch):
    gpu(monkeypatch, (8, 9), "NVIDIA L4")
    assert resolve(config(backend="emulated"), "cuda").backend.compiled
    assert not resolve(config(backend="emulated", compile=False), "cuda").backend.compiled
    assert resolve(config(backend="emulated"), "cuda").backend.compile_options == {"emulate_precision_casts": True}


def test_a_compilation_that_cannot_be_right_is_refused(config, monkeypatch):
    problem = refusal(config(backend="emulated", recipe="block", compile=True), "cpu")
    assert "compiler for CPUs computes blocks at the edge wrongly" in problem.cause
    assert not resolve(config(backend="emulated", recipe="block", compile="auto"), "cpu").backend.compiled
    assert resolve(config(backend="emulated", recipe="current", compile=True), "cpu").backend.compiled
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu(monkeypatch, (8, 0), "NVIDIA A100")
    assert "no conversion to FP8" in refusal(config(backend="emulated", compile=True)).cause


# torchao


@pytest.mark.usefixtures("ada")
@pytest.mark.parametrize("recipe", ["auto", "current"])
def test_without_transformer_engine_auto_takes_torchao_and_says_why(config, recipe):
    plan = resolve(config(recipe=recipe), "cuda")
    assert (plan.ran, plan.reason, plan.backend.name) == ("fp8_hybrid", None, "torchao")
    assert (plan.recipe, plan.backend.compiled) == ("current", True)
    said = plan.backend.kernels(50257)["layers"]
    assert said == "torchao's float8, compiled, not Transformer Engine's: Transformer Engine is not installed"
    assert not resolve(config(recipe=recipe, compile=False), "cuda").backend.compiled


@pytest.mark.usefixtures("ada")
@pytest.mark.parametrize(("recipe", "backend"), [("delayed", "auto"), ("block", "auto"), ("delayed", "te")])
def test_what_torchao_has_not_falls_back_without_transformer_engine(config, recipe, backend):
    """As before there was torchao."""
    plan = resolve(config(recipe=recipe, backend=backend), "cuda")
    assert (plan.ran, plan.backend.name) == ("bf16", "reference")
    assert plan.reason.startswith("Transformer Engine is not installed")
    assert (f"not recipe={recipe}" in plan.reason) == (backend == "auto")


@pytest.mark.usefixtures("ada")
@pytest.mark.parametrize("backend", ["auto", "torchao"])
def test_without_either_fp8_falls_back(config, monkeypatch, backend):
    without_torchao(monkeypatch)
    plan = resolve(config(recipe="auto", backend=backend), "cuda")
    assert (plan.ran, plan.backend.name) == ("bf16", "reference")
    assert "torchao is not installed" in plan.reason
    assert "torchao is not installed" in refusal(config(recipe="auto", backend=backend, fallback="error")).cause


def test_torchao_on_a_cpu_is_never_emulated(config):
    plan = resolve(config(recipe="auto", backend="torchao", trainer={"accelerator": "cpu"}), "cpu")
    assert (plan.ran, plan.backend.name) == ("fp32", "reference")
    wanted = config(recipe="auto", backend="torchao", fallback="error", trainer={"accelerator": "cpu"})
    assert "the CPU has no FP8 matrix units" in refusal(wanted, "cpu").cause


@pytest.mark.usefixtures("ada")
def test_rowwise_needs_hopper(config, monkeypatch):
    monkeypatch.setattr(resolving, "why_not_recipe", support.why_not_recipe)
    for backend in ("auto", "torchao"):
        problem = refusal(config(recipe="rowwise", backend=backend))
        assert "has compute capability 8.9, and recipe=rowwise needs 9.0" in problem.cause
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert resolve(config(recipe="rowwise"), "cuda").recipe == "rowwise"


def wgrad(run):
    return replace(run, precision=replace(run.precision, backward="bf16_wgrad"))


@pytest.mark.usefixtures("hopper")
def test_torchao_is_taken_for_what_transformer_engine_has_not(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends.Torchao, "torch_attention", lambda self: "torch's")
    found = resolve(config(recipe="rowwise"), "cuda").backend
    assert found.name == "torchao"
    assert "not Transformer Engine's: it has no scale a row" in found.kernels(50257)["layers"]
    assert resolve(wgrad(config(recipe="auto")), "cuda").backend.name == "torchao"
    without_torchao(monkeypatch)
    problem = refusal(wgrad(config(recipe="auto")))
    assert problem.cause.endswith("they cannot here: torchao is not installed")
    assert ".[torchao]" in problem.remedy


# CUDA graphs

FITS = SMALL_TOKENS // POSITIONS  # sequences of the largest micro-batch that is small


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("micro_batch_size", "cuda_graphs", "expected"),
    [(FITS, "auto", True), (FITS + 1, "auto", False), (FITS + 1, True, True), (1, True, True), (1, False, False)],
)
def test_graphs_are_for_small_micro_batches_unless_told(config, micro_batch_size, cuda_graphs, expected):
    plan = resolve(config(micro_batch_size=micro_batch_size, cuda_graphs=cuda_graphs), "cuda")
    assert plan.backend.name == "fused"
    assert plan.backend.graphs is expected


@pytest.mark.usefixtures("hopper")
def test_graphs_are_refused_on_a_gpu_without_the_layers_for_them(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    problem = refusal(config(micro_batch_size=1, cuda_graphs=True))
    assert problem.cause.startswith("cuda_graphs=true records only the fused FP8 layers")
    assert "cuda_graphs=auto" in problem.remedy


# The machine


def test_reasons_of_a_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert "A100 has compute capability 8.0" in support.why_not_te_fp8()
    without_torchao(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in support.why_not_te_fp8()


@pytest.mark.parametrize("error", [OSError("libcudnn.so.9: cannot open"), ImportError("undefined symbol: _ZN\nmore")])
def test_a_broken_transformer_engine_is_a_reason(monkeypatch, error, tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(f"raise {error!r}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    reason = support.why_not_te_fp8()
    assert reason.startswith(f"Transformer Engine does not load: {type(error).__name__}")
    assert "\n" not in reason


def test_every_backend_stands_in_the_schema_and_says_what_settings_it_cannot_have():
    told = get_args(get_type_hints(FP8PrecisionConfig)["backend"])
    assert sorted(resolving.BACKENDS) == sorted(WHY_NOT) == sorted(set(told) - {"auto"})

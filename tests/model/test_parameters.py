"""Parameters by their block's description: names, shapes, counts, initial values and the optimizer's bytes."""

import math
import zlib
from dataclasses import replace

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config.schema import AdamWOptimizer, MuonOptimizer
from gpt2_fp8.engine.optim import build_optimizer, state_like
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import GPT2, initialise, padded_vocabulary
from gpt2_fp8.model.parameters import optimizer_bytes, parameter_count, parameters, peak_bf16_flops
from tests.common import CONFIG, OPTIM, VOCAB, build
from tests.layers.standins import FAMILIES, families

MODELS = ["tiny", "gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl", "gpt2_wide"]
MODELS += ["gpt2_modern", "gpt2_modern_medium", "gpt2_modern_large"]
OPTIONS = ["gpt2_optimized", "llama3_small", "llama3_2_1b", "llama3_8b", "qwen3_0_6b"]  # which the fused layers lack
WITH_FAMILIES = [(model, family) for model in MODELS for family in FAMILIES]
WITH_FAMILIES += [(model, family) for model in OPTIONS for family in ("reference", "te")]
# GPT-2 124M as checkpoints have it: a change of a name or a shape makes them unreadable.
OUTSIDE = {
    "tokens.weight": (50304, 768), "positions.weight": (1024, 768), "head.layer_norm_weight": (768,),
    "head.layer_norm_bias": (768,),
}  # fmt: skip
BLOCK = {
    "qkv.layer_norm_weight": (768,), "qkv.layer_norm_bias": (768,), "qkv.weight": (2304, 768), "qkv.bias": (2304,),
    "projection.weight": (768, 768), "projection.bias": (768,), "mlp.layer_norm_weight": (768,),
    "mlp.layer_norm_bias": (768,), "mlp.fc1_weight": (3072, 768), "mlp.fc1_bias": (3072,),
    "mlp.fc2_weight": (768, 3072), "mlp.fc2_bias": (768,),
}  # fmt: skip
GPT2_124M = OUTSIDE | {f"blocks.{i}.{name}": shape for i in range(12) for name, shape in BLOCK.items()}
# GPT-2: of its checkpoints (gpt2_medium is 355M there). The others: of the weights that their authors published, which
# their model cards give as 8.03B, 1.23B, and 0.6B of which 0.44B are not the embedding's.
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200,
    "llama3_8b": 8_030_261_248, "llama3_2_1b": 1_235_814_400, "qwen3_0_6b": 596_049_920,
}  # fmt: skip


MUON = MuonOptimizer(name="muon", matrix_lr=None, momentum=0.95, ns_steps=5)
CHOICES = [*(AdamWOptimizer(name=name) for name in ("adamw", "adamw_bf16")), MUON]


@pytest.fixture(scope="module")
def configs():
    names = {path.stem for path in (compose.conf_dir() / "model").glob("[!_]*.yaml")}
    assert names == {*MODELS, *OPTIONS}
    return {name: compose.preflight([f"model={name}", "data.tokenizer=gpt2"])[0].model for name in names}


@pytest.fixture(scope="module")
def on_meta():
    """Build a model of any set of layers, without memory."""

    def make(config, family, vocabulary, keep_bf16=()):
        with torch.device("meta"):
            return GPT2(config, vocabulary, load(family), keep_bf16)

    with families() as load:
        yield make


def test_gpt2s_names_and_shapes_are_those_of_its_checkpoints(configs, on_meta):
    assert {p.name: p.shape for p in parameters(configs["gpt2"], 50304)} == GPT2_124M
    for family in FAMILIES:
        state = on_meta(configs["gpt2"], family, 50257).state_dict()
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == GPT2_124M


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("model", "family"), WITH_FAMILIES)
def test_every_set_of_layers_has_what_is_described(configs, on_meta, model, family, bias):
    config = replace(configs[model], bias=bias)
    rows = padded_vocabulary(50257)
    built = {name: tuple(p.shape) for name, p in on_meta(config, family, 50257).named_parameters()}
    described = list(parameters(config, rows))
    assert built == {p.name: p.shape for p in described}
    assert len(described) == len(built)
    assert sum(map(math.prod, built.values())) == parameter_count(config, rows) == sum(p.numel for p in described)


def test_blocks_that_stay_in_bf16_have_the_same(configs, on_meta):
    kept = on_meta(configs["tiny"], "fused", 257, keep_bf16=("first", "head"))
    plain = on_meta(configs["tiny"], "reference", 257)
    assert {n: p.shape for n, p in kept.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}


def test_transformer_engine_is_told_what_the_block_is(configs, on_meta):
    block = on_meta(configs["gpt2"], "te", 50257).blocks[0]
    assert (block.qkv.eps, block.mlp.eps, block.mlp.activation) == (1e-5, 1e-5, "gelu")
    assert (block.attention.kernel.heads, block.attention.kernel.groups) == ((12, 64), 12)
    assert block.qkv.normalization == block.mlp.normalization == "LayerNorm"
    model = on_meta(configs["qwen3_0_6b"], "te", 50257)
    block = model.blocks[0]
    assert {layer.normalization for layer in (block.qkv, block.mlp, model.head)} == {"RMSNorm"}
    assert {layer.eps for layer in (block.qkv, block.mlp, model.head)} == {block.attention.epsilon} == {1e-6}
    assert (block.attention.kernel.heads, block.attention.kernel.groups) == ((16, 128), 8)
    assert block.mlp.activation == "swiglu"
    model = on_meta(configs["gpt2_modern"], "te", 50257)
    assert (model.blocks[0].mlp.activation, model.blocks[0].mlp.fc1_bias) == ("srelu", None)


@pytest.mark.parametrize("model", PUBLISHED)
def test_counts_are_those_published(configs, model):
    assert parameter_count(configs[model], configs[model].vocab_size or 50257) == PUBLISHED[model]


@pytest.mark.parametrize("gpt2s", [True, False])
def test_initial_values_are_what_names_alone_said(gpt2s):
    """The values that runs of this version begin with, bit for bit: they once followed from suffixes of names."""
    options = {"bias": gpt2s, "depth_scaled_init": gpt2s, "tied_head": gpt2s, "qk_norm": not gpt2s}
    model = build(replace(CONFIG, n_embd=64, n_layer=3, **options), seed=7)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            expected = torch.zeros_like(parameter)
        elif name.endswith(("layer_norm_weight", "_norm")):
            expected = torch.ones_like(parameter)
        else:
            into_residual = name.endswith(("projection.weight", "fc2_weight")) and gpt2s
            generator = torch.Generator().manual_seed(zlib.crc32(f"7/{name}".encode()))
            std = 0.02 / math.sqrt(6) if into_residual else 0.02
            expected = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            if name in ("tokens.weight", "head.weight"):
                expected[VOCAB:] = 0
        assert torch.equal(parameter, expected), name


def test_only_known_gpus_have_a_peak():
    assert peak_bf16_flops("NVIDIA H200") == 989e12
    assert peak_bf16_flops("NVIDIA GeForce RTX 9090") is None


@pytest.mark.parametrize(("size", "padded"), [(1, 64), (64, 64), (257, 320), (50257, 50304)])
def test_padded_vocabulary(size, padded):
    assert padded_vocabulary(size) == padded


def test_before_training_every_id_is_about_as_likely():
    """The loss is ln 50,257 = 10.82 and little more: whoever sees that has not trained."""
    size = 50257
    model = GPT2(CONFIG, size, Composed(reference, recompute="none"))
    initialise(model, seed=1)
    drawn = torch.randint(size, (8, CONFIG.n_positions + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(drawn[:, :-1])[..., :size]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), drawn[:, 1:].flatten()).item()
    assert 0 <= loss - math.log(size) < 0.1


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
@pytest.mark.parametrize("mlp", ["gelu", "swiglu", "relu_squared"])
def test_bytes_are_those_of_the_state(choice, mlp):
    config = replace(CONFIG, mlp=mlp, mlp_width=136, tied_head=mlp == "gelu")
    model = build(config)
    optimizer = build_optimizer(model, OPTIM, choice)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [x for of in optimizer.state.values() for name, x in of.items() if name != "step"]
    wanted = optimizer_bytes(choice, config, padded_vocabulary(VOCAB))
    assert size(state) == wanted
    assert size(state_like(model, choice)) == wanted, "what is held while the first gradients are computed"

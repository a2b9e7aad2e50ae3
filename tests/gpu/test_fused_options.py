"""The fused layers with a modern block's options, each alone and all together, against plain torch in bf16 and float64.

What GPT-2's own block shows of these layers is in `test_fused`, but for attention; of the kernels alone, in
`test_rotary`.
"""

from dataclasses import replace

import pytest
import torch

from gpt2_fp8.config.block_spec import Heads, RoPE
from gpt2_fp8.fp8 import state
from gpt2_fp8.layers import attention, reference
from gpt2_fp8.layers.reference import angles
from tests.gpu import common, test_graphs
from tests.gpu.common import CONFIG, calibrated, error, gradients, hopper, prepared, step, tokens
from tests.gpu.test_fused import against_bf16, assert_recomputing_changes_no_bit, of_ours
from tests.gpu.test_te_models import told_apart
from tests.runs import assert_same_checkpoint, checkpoint, train, train_until

pytestmark = [pytest.mark.fp8, hopper]

BANDS = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_positions": 64}
MODERN = {
    "norm": "rms_norm",
    "positions": "rope",
    "qk_norm": True,
    "bias": False,
    "tied_head": False,
    "mlp": "relu_squared",
}
OPTIONS = {
    "RMSNorm": {"norm": "rms_norm"},
    "its epsilon": {"norm": "rms_norm", "norm_epsilon": 1e-3},
    "RoPE": {"positions": "rope"},
    "Llama 3's scaling": {"positions": "rope", "rope_scaling": 8.0, **BANDS},
    "QK-norm": {"qk_norm": True},
    "an untied head": {"tied_head": False},
    "larger heads": {"head_size": 128},
    "squared ReLU": {"mlp": "relu_squared"},
    "all": MODERN,
    "all, heads of 128": {**MODERN, "n_head": 2},
    "all, heads of 80": {**MODERN, "head_size": 80},
    "all, larger heads": {**MODERN, "head_size": 128},
    "all but QK-norm": {**MODERN, "qk_norm": False},
    "all but RoPE": {**MODERN, "positions": "learned"},
}
WORDS = [f"model.{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in MODERN.items()]
ALL = replace(CONFIG, **MODERN)
every_option = pytest.mark.parametrize("name", OPTIONS)


@pytest.fixture(params=["FlashAttention 4", "without it"])
def flash(request, monkeypatch):
    """A test of this is with FlashAttention 4's backward and without it."""
    if request.param == "without it":
        monkeypatch.setattr(attention, "why_no_flash", lambda: "hidden by the test")
    elif reason := attention.why_no_flash():
        pytest.skip(reason)
    return request.param


def assert_each_like(ours, expected):
    """A part that is wrong would drown in the norm of all. Softmax sees no bias of keys: its gradient is noise."""
    for name in expected:
        of_values = [
            torch.cat(g[name].chunk(3)[::2]) if name.endswith("qkv.bias") else g[name] for g in (ours, expected)
        ]
        assert error(*({name: gradient} for gradient in of_values)) < 0.4, name


@every_option
def test_every_option_is_close_to_bf16(flash, name):
    config = replace(CONFIG, **OPTIONS[name])
    model, _, ours, expected = common.assert_like_bf16("fused", tokens(4), config, rel=3e-3, most=0.15)
    assert_each_like(ours, expected)
    assert of_ours(model.head)
    assert all(of_ours(block) for block in model.blocks)
    of_flash = flash != "without it" and model.spec.heads.size in attention.HEAD_SIZES
    assert isinstance(model.blocks[0].attention, attention.FlashAttention if of_flash else attention.TEAttention)


@every_option
def test_every_vector_counts(name):
    """Norms and biases of values of their own, and attention that is not uniform; each parameter by itself."""
    config, ids = replace(CONFIG, **OPTIONS[name]), tokens(8)
    plain = told_apart(common.build("reference", config=config))
    _, expected = gradients(plain, ids, False, common.bf16)
    model, fp8 = common.build("fused", config=config), common.computing("fused", config=config)
    model.load_state_dict(plain.state_dict())
    common.calibrate(model, common.loss_of(model, True), ids, fp8.forward_context)
    _, ours = gradients(model, ids, True, fp8.forward_context)
    assert_each_like(ours, expected)


@pytest.mark.parametrize("batch", [64, 16], ids=["without logits", "with logits"])
def test_an_untied_heads_gradient_is_its_own(batch):
    """The embedding's is of the ids that are read, and the head's of all; 64 sequences are 16,384 rows."""
    ids = tokens(batch)
    model, fp8 = calibrated("fused", ids=ids, config=ALL)
    _, ours = gradients(model, ids, True, fp8.forward_context)
    _, expected = gradients(common.build("reference", config=ALL), ids, False, common.bf16)
    unread = torch.ones(len(ours["tokens.weight"]), dtype=torch.bool, device="cuda")
    unread[ids[:, :-1].flatten().long()] = False
    assert torch.count_nonzero(ours["tokens.weight"][unread]) == 0
    assert torch.count_nonzero(ours["head.weight"][unread]) > 0
    for name in ("tokens.weight", "head.weight", "head.layer_norm_weight"):
        assert error({name: ours[name]}, {name: expected[name]}) < 0.2, name


def test_kept_parts_get_the_angles():
    for keep_bf16 in (["first"], ["head", "last"]):
        against_bf16(tokens(4), keep_bf16, config=ALL)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("config", [ALL, replace(ALL, n_head=2)], ids=["heads of 64", "heads of 128"])
@pytest.mark.parametrize("choice", ["mlp", "full"])
def test_recomputing_changes_no_bit(flash, choice, config):
    assert_recomputing_changes_no_bit(choice, config)


@pytest.mark.usefixtures("deterministic")
def test_gradients_of_micro_batches_add_up(flash):
    one, two = tokens(4), tokens(4, seed=1)
    model, fp8 = calibrated("fused", ids=one, config=ALL)
    with state.restored(model):
        _, first = gradients(model, one, True, fp8.forward_context, True)
        _, second = gradients(model, two, True, fp8.forward_context, False)
    model.zero_grad(set_to_none=True)
    for ids, is_first in ((one, True), (two, False)):
        with fp8.forward_context():
            loss = common.loss_of(model, True)(ids, is_first)
        loss.backward()
    total = {name: first[name] + second[name] for name in first}
    assert {name for name, p in model.named_parameters() if error({name: p.grad}, {name: total[name]}) > 1e-5} == set()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("more", [[], ["activation_checkpointing=full"], ["model.n_positions=256"]], ids=str)
def test_graphs_give_the_same_bits(more):
    """Short sequences have torch's kernels of attention; those of 256 tokens FlashAttention 4's, where it is."""
    runs = []
    for graphed in (True, False):
        engine = test_graphs.built(graphed, *WORDS, *more)
        steps = []
        for seed in range(2):
            steps.append(test_graphs.step(engine, tokens(12, seed, engine.model.config.n_positions)))
            engine.model.zero_grad(set_to_none=True)
        runs.append((steps, state.capture(engine.model)))
    test_graphs.assert_same_steps(*runs)


@pytest.mark.parametrize("kernel", ["sdpa", "cudnn", "te", "math"])
def test_every_kernel_of_attention_is_close_to_the_layers_own(kernel):
    words = [*WORDS, "model.n_positions=256", "model.n_layer=1", "cuda_graphs=false", "precision.backend=fused"]
    expected_loss, expected = step(prepared(*words), 1, 256)
    loss, found = step(prepared(*words, f"attention={kernel}"), 1, 256)
    assert loss == pytest.approx(expected_loss, rel=2e-3)
    assert error(found, expected) < 0.1


@pytest.mark.parametrize(("rope", "qk_norm"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(
    ("n_head", "size", "batch", "positions"),
    [(4, 64, 2, 256), (2, 128, 2, 256), (4, 64, 3, 48), (4, 80, 2, 256), (4, 32, 2, 256)],
)
def test_attention_matches_float64(flash, n_head, size, batch, positions, rope, qk_norm):
    """Its result, and the gradients of its packed input and of QK-norm's weights."""
    from gpt2_fp8.kernels.rotary import Turns

    heads = Heads(n_head, n_head, size, qk_norm)
    layer, plain = attention.attention(heads).cuda(), reference.attention(heads, 0.0).cuda().double()
    generator = torch.Generator("cuda").manual_seed(positions)
    for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.nn.init.normal_(ours.data, mean=1.0, std=0.3, generator=generator)
        theirs.data.copy_(ours)
    packed, upstream = (
        torch.randn(batch, positions, width, generator=generator, device="cuda").bfloat16()
        for width in (heads.packed, heads.queries)
    )
    angle = angles(RoPE(1e4), size, positions, torch.device("cuda")) if rope else None
    results = []
    for module, given, dtype in (
        (layer, angle if angle is None else Turns.of(angle), None),
        (plain, angle, torch.double),
    ):
        x = packed.to(dtype or packed.dtype).requires_grad_()
        out = module(x, given)
        found = torch.autograd.grad(out, [x, *module.parameters()], upstream.to(out.dtype))
        assert found[0].is_contiguous()
        results.append([out.detach(), *found[0].chunk(3, -1), *found[1:]])
    assert len(results[0]) == (6 if qk_norm else 4)
    most, furthest = (0.015, 0.04) if rope or qk_norm else (0.01, 0.03)  # bf16 rounds by 2^-9, a few times over
    for i, (ours, exact) in enumerate(zip(*results, strict=True)):
        assert (ours.double() - exact).norm() < most * exact.norm(), i
        assert (ours.double() - exact).abs().max() < furthest * exact.abs().max(), i


def test_gradients_of_attention_are_parts_of_one(flash, monkeypatch):
    """They are not copied: FlashAttention 4's, nor cuDNN's, which Transformer Engine calls."""
    found, real = [], attention._whole
    monkeypatch.setattr(attention, "_whole", lambda *given: found.append(real(*given)) or found[-1])
    ids = tokens(4)
    model, fp8 = calibrated("fused", ids=ids, config=ALL)
    found.clear()
    gradients(model, ids, True, fp8.forward_context)
    assert [whole is not None for whole in found] == [True] * ALL.n_layer


def test_an_evaluation_and_text_leave_training_as_it_was():
    ids = tokens(4)
    losses = []
    for evaluates in (True, False):
        model, fp8 = calibrated("fused", ids=ids, config=ALL)
        if evaluates:
            with common.evaluating(model, fp8):
                loss = common.loss_of(model, True)(ids)
                assert torch.isfinite(loss)
                assert torch.isfinite(model(ids[:2, :-1].long())[..., : common.VOCAB]).all()
        losses.append(gradients(model, ids, True, fp8.forward_context, True)[0])
    assert losses[0] == losses[1]


def test_a_run_resumes_exactly(tmp_path):
    words = [
        *WORDS, "precision.backend=fused", "trainer.deterministic=true", "callbacks.checkpoint_every_n_steps=4",
        "data.val_sequences=0", "callbacks.sample_tokens=0",
    ]  # fmt: skip
    train(tmp_path / "whole", *words, base=common.RUN)
    train_until(8, tmp_path / "legs", *words, base=common.RUN)
    train(tmp_path / "legs", *words, "ckpt_path=last", base=common.RUN)
    assert_same_checkpoint(checkpoint(tmp_path / "whole", 12), checkpoint(tmp_path / "legs", 12))

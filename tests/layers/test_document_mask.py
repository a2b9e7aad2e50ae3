"""Attention within documents: the mask, attention under it in float64, and what a model can see through it."""

import math

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.engine.gradients import Gradients
from gpt2_fp8.fp8.base import twin_of
from gpt2_fp8.fp8.resolve import resolve
from gpt2_fp8.layers import sdpa
from gpt2_fp8.layers.sdpa import within_documents
from gpt2_fp8.model.generate import generate
from gpt2_fp8.model.gpt2 import initialise
from tests.data.token_files_made import llm_c, nano, some_ids
from tests.runs import SMALL

END = 256  # of a document, in bytes
TOKENS = 32


def allowed(ids, begins=False):
    """Whether token i may look at token j, by the definition: no document ends from j to before i.

    `begins`: the separator is a document's first token, so no document begins from after j to i.
    """
    batch, tokens = ids.shape
    seen = torch.zeros(batch, tokens, tokens, dtype=torch.bool)
    for b in range(batch):
        for i in range(tokens):
            for j in range(i + 1):
                seen[b, i, j] = END not in ids[b, j + begins : i + begins].tolist()
    return seen


def text(*ends, batch=2, tokens=TOKENS, seed=0):
    ids = torch.randint(0, END, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    ids[:, list(ends)] = END
    return ids


PLACES = {
    "none": (), "first": (0,), "last": (TOKENS - 1,), "in the middle": (13,), "two": (5, 20), "side by side": (7, 8, 9),
    "everywhere": range(TOKENS), "first and last": (0, TOKENS - 1),
}  # fmt: skip


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_mask_is_the_definitions(places, begins, dtype):
    ids = text(*PLACES[places])
    mask = within_documents(ids, END, dtype, begins)
    assert (mask.shape, mask.dtype) == ((2, 1, TOKENS, TOKENS), dtype)
    assert torch.equal(mask[:, 0] == 0, allowed(ids, begins))
    assert torch.equal(mask[:, 0] == -torch.inf, ~allowed(ids, begins))


def test_the_separator_is_of_the_document_that_it_ends_or_begins():
    """Written out: two documents, `1 2` and `3 4`, as nanoGPT's files have them and as llm.c's have them."""
    of = {False: [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]],
          True: [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]}  # fmt: skip
    for begins, rows in of.items():
        seen = within_documents(torch.tensor([[1, 2, END, 3]]), END, torch.float32, begins)[0, 0] == 0
        assert seen.int().tolist() == rows, begins


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("shared", [1, 2])
def test_attention_and_its_gradients_are_the_formulas_in_float64(places, shared):
    ids, generator = text(*PLACES[places]), torch.Generator().manual_seed(3)
    shape = (2, TOKENS, 4, 8), (2, TOKENS, 4 // shared, 8), (2, TOKENS, 4 // shared, 8)
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shape)
    found = sdpa.causal(q, k, v, 0.0, mask=within_documents(ids, END, torch.float64))
    found.square().sum().backward()
    gradients = [x.grad for x in (q, k, v)]
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(shared, dim=2) for x in (k, v))
    scores = torch.einsum("bihc,bjhc->bhij", q, keys) / math.sqrt(8)
    weights = scores.masked_fill(~allowed(ids)[:, None], -torch.inf).softmax(-1)
    expected = torch.einsum("bhij,bjhc->bihc", weights, values).flatten(2)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for ours, x in zip(gradients, (q, k, v), strict=True):
        torch.testing.assert_close(ours, x.grad, rtol=1e-9, atol=1e-12)


LAYERS = {
    "fp32": ["precision=fp32"],
    "fp32, RoPE": ["precision=fp32", "model.positions=rope"],
    "compiled": ["precision=fp32", "compile=true"],
    "recomputed": ["precision=fp32", "activation_checkpointing=full"],
    # current scaling would take a scale from the whole tensor
    "emulated": ["precision=fp8_hybrid", "precision.backend=emulated", "recipe=delayed"],
}


def engine(*words):
    (config,) = compose.preflight([*SMALL, "trainer=cpu", f"model.n_positions={TOKENS}", *words])
    plan = resolve(config, "cpu")
    model = plan.backend.build(257)
    initialise(model, seed=1)
    return Gradients(plan, model, plan.backend.scaling(model), torch.Tensor.backward)


@pytest.mark.parametrize("layers", [name for name in LAYERS if name != "compiled"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_later_document_sees_nothing_of_an_earlier_one(layers, masked):
    of = engine(*LAYERS[layers], f"document_mask={str(masked).lower()}")
    changed = text(13, 20)
    changed[:, :13] = text(13, 20, seed=9)[:, :13]
    logits = []
    for ids in (text(13, 20), changed):
        with torch.no_grad(), of.plan.backend.forward_context():
            logits.append(of.model(ids))
    assert not torch.equal(logits[0][:, :14], logits[1][:, :14])
    assert torch.equal(logits[0][:, 14:], logits[1][:, 14:]) == masked


@pytest.mark.whole
@pytest.mark.parametrize("layers", [pytest.param(n, marks=[pytest.mark.slow] * (n == "compiled")) for n in LAYERS])
def test_text_of_one_document_has_the_loss_that_it_has_without_a_mask(layers):
    ids, found = text(TOKENS, tokens=TOKENS + 1), []
    for masked in ("true", "false"):
        of = engine(*LAYERS[layers], f"document_mask={masked}")
        of.model.zero_grad()
        loss = of.of_step(ids, 2)
        found.append((loss.item(), of.model.blocks[0].qkv.weight.grad.clone()))
        torch.compiler.reset()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    difference = (found[0][1] - found[1][1]).norm() / found[1][1].norm()
    assert difference < (0.05 if layers == "emulated" else 1e-4)


def test_the_loss_of_packed_documents_is_that_of_each_by_itself():
    """With RoPE, which sees distances alone, a document in the middle is one at the start; each block's mean agrees."""
    of = engine("precision=fp32", "model.positions=rope", "document_mask=true")
    ids = text(11, 23, tokens=TOKENS + 1, batch=1)
    logits = of.model(ids[:, :-1])
    for start, end in ((0, 12), (12, 24), (24, TOKENS)):
        alone = of.model(ids[:, start:end])
        torch.testing.assert_close(logits[:, start:end], alone, rtol=1e-4, atol=1e-5)


def test_a_step_that_is_run_again_in_bf16_has_the_same_mask():
    of = engine(*LAYERS["emulated"], "document_mask=true")
    assert twin_of(of.model).separator == of.model.separator == END
    of.model.separator_begins = True
    assert twin_of(of.model).separator_begins


@pytest.mark.parametrize(("write", "begins"), [(nano, False), (llm_c, True)])
def test_a_models_mask_is_that_of_its_files(tmp_path, write, begins):
    path = write(tmp_path / "text.bin", some_ids(4000))
    of_files = ["data=token_files", f"data.train_files=[{path}]", "data.tokenizer=bytes", "data.val_sequences=0"]
    words = [word for word in SMALL if not word.startswith("data")]
    (config,) = compose.preflight([*words, "trainer=cpu", "precision=fp32", "document_mask=true", *of_files])
    model = resolve(config, "cpu").backend.build(257)
    initialise(model, seed=1)
    with torch.no_grad():
        rows = [model(text(13, seed=seed)[:, : TOKENS // 2].long()) for seed in (0, 9)]
    assert (model.separator, model.separator_begins) == (END, begins)
    assert torch.equal(rows[0][:, 13, :], rows[1][:, 13, :]) == begins, "of a separator that begins a document"


def test_generated_text_does_not_look_back_beyond_a_separator():
    of = engine("precision=fp32", "document_mask=true")
    prompts = [[*before, END, 5] for before in ([1, 2, 3], [99, 98, 97])]
    drawn = [generate(of.model.eval(), prompt, 8, 257, TOKENS, seed=0) for prompt in prompts]
    assert drawn[0] == drawn[1]

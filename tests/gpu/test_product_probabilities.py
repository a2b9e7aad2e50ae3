"""The head's probabilities in FP8 straight from its product: the kernel, the references, what is known of each row, and
the whole head, against float64 and against the head with logits."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gpt2_fp8.fp8 import state
from gpt2_fp8.kernels.formats import EXPONENT, Slot
from gpt2_fp8.kernels.gemm import matmul
from gpt2_fp8.kernels.product import Operands
from tests.gpu import common, kernels
from tests.gpu.common import CONFIG, VOCAB, calibrated, error, gradients, tokens
from tests.gpu.kernels import DEVICE, E4M3, E5M2, bits, probability_rows, product_probabilities, target_rows
from tests.gpu.test_gemm import operands as normal_operands
from tests.gpu.test_layer_norm import exact_norm
from tests.gpu.test_product_activation import exact_product, whole

pytestmark = [pytest.mark.fp8, pytest.mark.usefixtures("hopper_kernels")]

LOG2E = 1.4426950408889634
# M, N, K, columns that count
CASES = [
    (64, 128, 128, 128), (192, 384, 256, 300), (64, 38400, 128, 38291), (448, 3072, 768, 3072), (8256, 3072, 768, 3001),
]  # fmt: skip
FEWEST_ROWS = "gpt2_fp8.kernels.product.FEWEST_ROWS"


def targets_of(m, vocab_size):
    targets = torch.randint(vocab_size, (m,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    targets[::7] = -1
    return targets


def exact_rows(operands, vocab_size):
    """Logits in float64, in powers of two, of the columns that count, and log2 of their sums of exponentials."""
    logits = exact_product(operands)[:, :vocab_size] * LOG2E
    return logits, (logits / LOG2E).logsumexp(1) * LOG2E


def made_of(operands, references, vocab_size, targets=None):
    targets = targets_of(len(references), vocab_size) if targets is None else targets
    return product_probabilities(operands, references, targets, vocab_size)


@pytest.mark.parametrize("case", CASES)
def test_matches_float64(case):
    *shape, vocab_size = case
    operands = whole(shape)
    logits, log_sums = exact_rows(operands, vocab_size)
    references = (log_sums - torch.linspace(0, 3, len(log_sums), device=DEVICE)).float()
    targets = targets_of(len(logits), vocab_size)
    q, qt, sums, at_target = made_of(operands, references, vocab_size, targets)
    assert torch.equal(bits(qt), bits(q.t()))
    counted = targets >= 0
    of_target = logits.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    torch.testing.assert_close(at_target[counted].double(), of_target[counted], rtol=1e-6, atol=1e-7)
    u = torch.zeros(len(logits), shape[1], dtype=torch.float64, device=DEVICE)
    u[:, :vocab_size] = (logits - references[:, None].double() + EXPONENT).exp2()
    off = (q.double() - u.float().to(E5M2).double()).abs()
    assert torch.count_nonzero(off) <= off.numel() // 1000, "float32's error where a number is halfway between two"
    assert torch.all(off <= 2**-2 * u.clamp_min(2**-16) * 1.01)
    assert torch.count_nonzero(q[:, vocab_size:].float()) == 0
    torch.testing.assert_close(sums.double().t(), u.view(len(u), -1, 128).sum(2), rtol=1e-5, atol=1e-9)


def test_a_nan_spoils_its_row_alone():
    operands, references = whole((192, 384, 256)), torch.zeros(192, device=DEVICE)
    one = made_of(operands, references, 300)
    operands.a.view(torch.uint8)[5, 3] = 0x7F  # E4M3's NaN
    q, qt, sums, _ = made_of(operands, references, 300)
    spoilt = torch.arange(192, device=DEVICE) == 5
    assert torch.equal(q[:, :300].float().isnan().any(1), spoilt)
    assert torch.equal(qt[:300].float().isnan().any(0), spoilt)
    assert torch.equal(sums.isnan().any(0), spoilt)
    assert torch.equal(q[~spoilt].float(), one.q[~spoilt].float())


def test_what_is_too_large_saturates():
    operands, references = whole((64, 128, 128)), torch.full((64,), -40.0, device=DEVICE)
    q, qt, sums, _ = made_of(operands, references, 128)
    assert torch.isfinite(q.float()).all()
    assert q.float().max() == 57344
    assert torch.equal(bits(qt), bits(q.t()))
    assert torch.all(sums > 57344)


def test_the_targets_logit_is_the_products_own():
    """It has the tensor cores' rounding, as the logits in the row's sum have: a row is one softmax."""
    a, b, out, *scales = normal_operands(192, 384, 768, dtype=torch.float32)
    operands = Operands(a, b, *scales)
    matmul(a, b, out, *scales, fast_accumulate=True)
    targets = torch.arange(192, device=DEVICE) * 5 % 384
    at = lambda x: x.double().gather(1, targets[:, None])[:, 0] * LOG2E  # noqa: E731
    ours = made_of(operands, out.double().logsumexp(1).float() * LOG2E, 384, targets).at_target.double()
    exact, rounded = at(exact_product(operands)), at(out)
    assert (ours - rounded).norm() < 0.05 * (exact - rounded).norm()


def test_more_elements_than_int32_counts():
    kernels.need(24)
    m, n, k, vocab_size = 65600, 50304, 128, 50257
    operands = whole((m, n, k))
    weight = operands.b.float().t() * (operands.a_scale_inv * operands.b_scale_inv)
    q, qt, sums, _ = made_of(operands, torch.full((m,), 20.0, device=DEVICE), vocab_size)
    for start in range(0, m, 8200):
        part = slice(start, start + 8200)
        u = (operands.a[part].float() @ weight * LOG2E - 9.0).exp2()
        u[:, vocab_size:] = 0
        off = q[part].float() != u.to(E5M2).float()
        assert torch.count_nonzero(off) <= off.numel() // 500
        assert torch.equal(bits(qt[:, part].t()), bits(q[part]))
        torch.testing.assert_close(sums[:, part].sum(0), u.sum(1), rtol=1e-5, atol=0)


# References, and what is known of each row


def a_head(m=448, n=3072, k=256, vocab_size=3001):
    """Operands of whole numbers whose logits differ by orders of magnitude, and targets of which few ids are most."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    a, b = (torch.randint(-3, 4, (rows, k), device=DEVICE, generator=generator).float() for rows in (m, n))
    a[:, 0] = torch.randint(4, 9, (m,), device=DEVICE, generator=generator).float()
    b[:, 0] = torch.linspace(8, -8, n, device=DEVICE).round()  # small ids are likely
    operands = Operands(a.to(E4M3), b.to(E4M3), *(torch.full((1,), unit, device=DEVICE) for unit in (0.25, 0.125)))
    targets = (vocab_size ** torch.rand(m, device=DEVICE, generator=generator) - 1).long()
    targets[::7] = -1
    return operands, targets


@pytest.mark.parametrize(("ids", "vocab_size"), [(128, 3001), (2048, 3001), (2048, 257)])
def test_references_are_at_most_the_sum_and_have_target_and_input(monkeypatch, ids, vocab_size):
    monkeypatch.setattr("gpt2_fp8.kernels.probabilities.IDS", ids)
    operands, targets = a_head(vocab_size=vocab_size)
    few = kernels.choose_frequent(targets, operands.b, vocab_size)
    assert few.counted == min(ids, vocab_size)
    logits, log_sums = exact_rows(operands, vocab_size)
    ours = kernels.compute_references(operands, targets, few)
    counted = targets >= 0
    at_target = logits.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    at_input = logits[1:].gather(1, targets[:-1].clamp_min(0)[:, None])[:, 0]
    assert torch.all(ours.double() <= log_sums + 1e-4)
    assert torch.all(ours[counted].double() >= at_target[counted] - 1e-4)
    assert torch.all(ours[1:][counted[:-1]].double() >= at_input[counted[:-1]] - 1e-4)
    if ids > vocab_size:
        torch.testing.assert_close(ours.double(), log_sums, rtol=0, atol=0.2)
    counts = torch.bincount(targets[counted], minlength=vocab_size)
    rows = operands.b.float()[counts.sort(descending=True, stable=True).indices[:ids]]
    assert torch.equal(few.weight[: len(rows)].float(), rows)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("room", [64, 2])
def test_rows_match_float64(z_loss, room):
    operands, targets = a_head()
    logits, log_sums = exact_rows(operands, 3001)
    off = torch.linspace(0, 3, len(log_sums), device=DEVICE)
    far = torch.tensor([3, 100, 101, 400, 447], device=DEVICE)
    targets[far] = torch.tensor([5, 6, 7, -1, 9], device=DEVICE)
    off[far] = 12.0
    references = (log_sums - off).float()
    made = made_of(operands, references, 3001, targets)
    loss_weight = torch.full((1,), 0.03, device=DEVICE)
    scale_inv = loss_weight / 2**EXPONENT / 0.9972
    known, aside = probability_rows(made, references, targets, loss_weight, scale_inv, room, z_loss)
    expected_far = [3, 100, 101, 447][:room]
    assert (aside.found.item(), aside.rows[: len(expected_far)].tolist()) == (4, expected_far)
    assert aside.targets[: len(expected_far)].tolist() == targets[expected_far].tolist()
    assert torch.all(aside.targets[len(expected_far) :] == -1)
    here = targets >= 0
    here[torch.tensor(expected_far, device=DEVICE)] = False
    assert all(torch.count_nonzero(column[~here]) == 0 for column in known)
    lse, at = log_sums / LOG2E, targets.clamp_min(0)[:, None]
    losses = F.cross_entropy(logits / LOG2E, targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(known.losses[here].double(), losses[here], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(known.log_sums[here].double(), lse[here], rtol=1e-5, atol=1e-5)
    more = 1 + 2 * z_loss * lse
    torch.testing.assert_close(known.factors[here].double(), ((-off).exp2() * more)[here], rtol=2e-5, atol=0)
    p = (logits - log_sums[:, None]).exp2().gather(1, at)[:, 0] * more
    stored = made.q.double().gather(1, at)[:, 0] * known.factors.double() * scale_inv.double()
    expected = (p - 1) * loss_weight.double() - stored
    torch.testing.assert_close(known.rest[here].double(), expected[here], rtol=1e-4, atol=1e-7)


def test_rows_at_targets_are_added():
    operands, targets = a_head()
    y, weight, y_inv, w_inv = operands
    generator = torch.Generator(DEVICE).manual_seed(5)
    dy = torch.randn(y.shape, device=DEVICE, generator=generator).bfloat16()
    factors, rest = (torch.rand(len(y), device=DEVICE, generator=generator) for _ in range(2))
    factors[targets < 0] = rest[targets < 0] = 0
    expected = dy.double() * factors[:, None].double()
    expected += rest[:, None].double() * weight.double()[targets.clamp_min(0)] * w_inv.double()
    of_weight = kernels.add_target_rows(dy, factors, rest, targets, (weight, w_inv), (y, y_inv))
    torch.testing.assert_close(dy.double(), expected, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(
        of_weight.double(), rest[:, None].double() * y.double() * y_inv.double(), rtol=2**-8, atol=1e-6
    )
    assert torch.count_nonzero(dy[targets < 0]) == 0


@pytest.mark.parametrize("rms", [False, True])
def test_a_normalised_row_times_its_factor(rms):
    generator = torch.Generator(DEVICE).manual_seed(6)
    x = torch.randn(208, 256, device=DEVICE, generator=generator).bfloat16()
    weight, bias = (torch.randn(256, device=DEVICE, generator=generator) for _ in range(2))
    bias = None if rms else bias
    slot = Slot(*(torch.full((1,), value, device=DEVICE) for value in (16.0, 1 / 16, 0.0)), E4M3)
    _, qt, _ = kernels.layer_norm_cast(x, weight, bias, 1e-5, slot)
    amax = slot.amax.clone()
    assert torch.equal(
        bits(kernels.layer_norm_transposed(x, weight, bias, 1e-5, slot, torch.ones(208, device=DEVICE))), bits(qt)
    )
    factors = torch.rand(208, device=DEVICE, generator=generator)
    ours = kernels.layer_norm_transposed(x, weight, bias, 1e-5, slot, factors)
    exact = exact_norm(x, weight, bias) * factors[:, None].double() * 16
    off = (ours.double().t() - exact).abs()
    assert torch.all(off <= exact.abs() * 2**-4 * 1.01 + 2**-10)
    assert torch.equal(slot.amax, amax), "factors are no part of the amax"


# What the gradient of logits that are stored lacks at targets


def stored_logits(rows=144, columns=400, vocab_size=385, d=272, z_loss=0.0):
    generator = torch.Generator(DEVICE).manual_seed(0)
    normal = lambda *shape: torch.randn(shape, device=DEVICE, generator=generator)  # noqa: E731
    logits, targets = (normal(rows, columns) * 4).bfloat16(), torch.arange(rows, device=DEVICE) * 7 % vocab_size
    targets[::5] = -1
    _, exponents = kernels.softmax_statistics(logits, targets, vocab_size)
    q, _ = kernels.softmax_gradient_cast(logits, targets, exponents, vocab_size, z_loss)
    of_q, of_weight, of_inputs = (torch.tensor([value], device=DEVICE) for value in (0.0301 / 2.0**15, 0.5, 0.25))
    weight, inputs = (normal(columns, d) * 30).to(E4M3), (normal(rows, d) * 30).to(E4M3)
    loss_weight = torch.tensor([0.03], device=DEVICE)
    return logits, targets, exponents, (q, of_q), loss_weight, (weight, of_weight), (inputs, of_inputs), z_loss


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_target_rows_are_the_rest_of_the_exact_gradient(z_loss):
    given = stored_logits(z_loss=z_loss)
    logits, targets, _, (q, of_q), loss_weight, (weight, of_weight), (inputs, of_inputs), _ = given
    real, counted = logits.double()[:, :385], targets >= 0
    at = targets.clamp_min(0)[:, None]
    more = 1 + 2 * z_loss * real.logsumexp(1, keepdim=True)
    exact = real.softmax(1).gather(1, at) * more - 1
    stored = q.double().gather(1, at) * of_q.double()
    rest = torch.where(counted[:, None], exact * loss_weight.double() - stored, 0.0)
    expected = rest * weight.double()[at[:, 0]] * of_weight.double(), rest * inputs.double() * of_inputs.double()
    assert rest.abs().max() > 0.03 * 0.04, "E5M2 has lost something"
    for ours, theirs in zip(target_rows(*given), expected, strict=True):
        assert torch.count_nonzero(ours[~counted]) == 0
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=1e-5 * theirs.abs().max().item())


def test_target_rows_repeat():
    one, other = target_rows(*stored_logits()), target_rows(*stored_logits())
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


# The whole head


def both_ways(monkeypatch, ids, room=64, change=None):
    """Loss and gradients by logits and by probabilities, and how many rows there were of each chunk to set aside."""
    model, fp8 = calibrated("fused", ids=ids, config=replace(CONFIG, tied_head=change is None))
    if change:
        change(model)
    with state.restored(model):
        by_logits = gradients(model, ids, True, fp8.forward_context)
    found = []
    from gpt2_fp8.layers import head

    def noted(*arguments):
        known, aside = rows(*arguments)
        found.append(aside.found.item())
        return known, aside

    rows = head.probability_rows
    monkeypatch.setattr(head, "probability_rows", noted)
    monkeypatch.setattr(FEWEST_ROWS, 1)
    monkeypatch.setattr(head, "ROOM", room)
    return by_logits, gradients(model, ids, True, fp8.forward_context), found


@pytest.mark.parametrize("chunk", [16384, 512])
def test_the_head_is_as_near_to_bf16_as_that_of_logits(monkeypatch, chunk):
    monkeypatch.setattr("gpt2_fp8.layers.head.CHUNK_ROWS", chunk)
    ids = tokens(4)
    ids[1, 40:] = -1
    exact_loss, exact = gradients(common.build("reference"), ids, False, common.bf16)
    (loss, expected), (again, ours), found = both_ways(monkeypatch, ids)
    assert found == [0] * (1 if chunk > 1024 else 2)
    assert again == pytest.approx(loss, rel=1e-4)
    assert again == pytest.approx(exact_loss, rel=2e-3)
    assert error(ours, exact) < 1.05 * error(expected, exact)
    assert error(ours, expected) < 0.06, "another grid of E5M2's numbers"


def surprise(model):
    """Give each row nearly all of its probability to an id that is neither frequent nor its target, nor its input."""
    with torch.no_grad():
        model.tokens.weight[:VOCAB] += 0.02 * torch.randn(
            VOCAB, model.tokens.weight.shape[1], device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(7)
        )
        model.head.weight[:VOCAB] = model.tokens.weight[:VOCAB].roll(VOCAB // 2, 0)
        model.head.layer_norm_weight.mul_(24)


def test_rows_far_from_their_references_are_computed_again(monkeypatch):
    monkeypatch.setattr("gpt2_fp8.kernels.probabilities.IDS", 128)
    (loss, expected), (again, ours), found = both_ways(monkeypatch, tokens(4), room=1024, change=surprise)
    assert 16 < found[0] < 1024, "some are set aside, and some are not"
    assert again == pytest.approx(loss, rel=1e-4)
    assert error(ours, expected) < 0.06


def test_more_rows_far_from_their_references_than_there_is_room_for_are_no_finite_loss(monkeypatch):
    """Their gradients have saturated. Such a step is run again in bf16."""
    monkeypatch.setattr("gpt2_fp8.kernels.probabilities.IDS", 128)
    (loss, _), (again, _), found = both_ways(monkeypatch, tokens(4), room=16, change=surprise)
    assert found[0] > 16
    assert math.isfinite(loss)
    assert math.isnan(again)


@pytest.mark.usefixtures("deterministic")
def test_it_repeats(monkeypatch):
    monkeypatch.setattr("gpt2_fp8.layers.head.ROOM", 1024)
    monkeypatch.setattr("gpt2_fp8.kernels.probabilities.IDS", 128)
    monkeypatch.setattr(FEWEST_ROWS, 1)
    ids = tokens(4)
    model, fp8 = calibrated("fused", ids=ids, config=replace(CONFIG, tied_head=False))
    surprise(model)
    runs = []
    for _ in range(2):
        with state.restored(model):
            runs.append(gradients(model, ids, True, fp8.forward_context))
    assert runs[0][0] == runs[1][0]
    common.assert_same_tensors(runs[0][1], runs[1][1])


@pytest.mark.parametrize("fewest", [1, 16384], ids=["probabilities", "logits"])
def test_nothing_but_ignored_targets_is_zero(monkeypatch, fewest):
    monkeypatch.setattr(FEWEST_ROWS, fewest)
    model, fp8 = calibrated("fused", ids=tokens(4))
    loss, ours = gradients(model, torch.full_like(tokens(4), -1), True, fp8.forward_context)
    assert loss == 0
    assert all(torch.count_nonzero(gradient) == 0 for gradient in ours.values())

"""What ranks tell each other: two processes joined by gloo, and all that is asked of them in one go."""

import sys
from contextlib import nullcontext

import pytest
import torch
from torch import distributed, nn

from gpt2_fp8.engine import exchange
from gpt2_fp8.engine.attempts import Attempts
from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.scaling import FP8Scaling
from gpt2_fp8.layers.delayed_scaling import Place
from gpt2_fp8.runtime import collectives
from tests import forkserver
from tests.common import ids
from tests.engine.test_engine import POSITIONS, with_scales
from tests.fp8.test_state import Layer
from tests.layers.test_delayed_scaling import E4M3, E5M2, scales, step

# Two ranks


def _rank(rank, folder):
    found = {}
    for time in ("once", "again"):
        distributed.init_process_group("gloo", init_method=f"file://{folder}/{time}", rank=rank, world_size=2)
        found[time] = _hosts(rank)
        if time == "again":
            found |= _tensors(rank) | _states(rank) | _micro_batching(rank)
        distributed.destroy_process_group()
    torch.save(found, f"{folder}/{rank}")


def _hosts(rank):
    """What is told from host to host, by the default group and then as if that were NCCL's."""
    get_backend = distributed.get_backend
    told = [collectives.largest(15 * rank), collectives.any_rank(rank == 0), collectives.any_rank(False)]
    distributed.get_backend = lambda *_: "nccl"
    told += [collectives.largest(15 * rank), collectives.any_rank(rank == 0), collectives.any_rank(False)]
    told += collectives.everyones(f"of rank {rank}")
    distributed.get_backend = get_backend
    return told


def _tensors(rank):
    tensor = torch.tensor([1.0, -5.0]) * (1 - 2 * rank)
    collectives.maximum(tensor)
    told = {"maximum": tensor.tolist(), "means": [_means(rank, dtype) for dtype in (torch.float32, torch.bfloat16)]}
    told["divided"] = [_divided(number) for number in (1, 4, 5)]
    return told | {"world": collectives.rank_and_world(), "several": collectives.is_distributed()}


def _divided(number):
    """How many items this rank computed of `number`, and whether it has the whole result."""
    counts, items = [], torch.arange(6.0 * number).view(number, 2, 3).to(torch.bfloat16)

    def compute(part):
        counts.append(len(part))
        return part * 3

    return counts, torch.equal(collectives.divided(items, compute), items * 3)


def _means(rank, dtype):
    """Means of gradients in three buckets, one of them strided, and of a parameter that has none."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2,), (3, 2), (1,), (4,))]
    gradients = torch.full((2,), 1.0 + rank), torch.arange(6.0).view(2, 3).t() + rank, None, torch.full((4,), 1.001)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    exchange.BUCKET_BYTES = 24
    exchange.Exchange(parameters, dtype=dtype).end()
    return [parameter.grad for parameter in parameters]


def _states(rank):
    """A model of both kinds of state."""
    model = nn.Module()
    model.scales, model.layer, model.fresh = scales(forward=1, gradient=1), Layer(), nn.Linear(1, 1)
    step(model.scales, *((1, 2), (8, 1))[rank])
    model.layer.init_fp8_metadata(1)
    for number, of in enumerate(model.layer.fp8_meta.values()):
        of.scale.fill_(2.0 + rank + number)
        of.amax_history.fill_(2.0 - rank + number)
    model.layer.fp8_meta["scaling_bwd"].amax_history[1, 0] = (torch.nan, 3.0)[rank]
    FP8Scaling(model, "delayed", 8, nullcontext).agree()
    agreed = state.capture(model)
    model.scales.begin(True)
    return {"agreed": agreed, "scale": model.scales.scale.clone()}


def _micro_batching(rank):
    """A calibration and a step in which rank 1 alone has room for two sequences and no more; and as it is where both
    had no more room from the first."""
    found = {}
    for size in (4, 2):
        torch.manual_seed(0)
        engine = with_scales()
        of, loss = Attempts(engine, share=8, size=size), engine.loss

        def limited(part, first=None, scale=1.0, loss=loss):
            if rank == 1 and len(part) > 2:
                raise torch.OutOfMemoryError
            return loss(part, first, scale)

        engine.loss = limited
        batch = ids(8, seed=rank, length=POSITIONS + 1)
        engine.scaling.ready, engine.scaling.settings = False, "those of a delayed recipe"
        of.find_scales(batch)
        calibrated = state.capture(engine.model)
        if size == 4:
            of.training.size = 4  # the step is to find out by itself
        of.in_own_precision(batch, engine.scaling.remember())
        gradient = engine.model.positions.weight.grad.clone()
        amax = engine.model.scales.slot(Place("forward", 0)).amax.item()
        found[size] = calibrated, {**state.capture(engine.model), "gradient": gradient}, of.training.size, amax
    return {"micro-batching": found}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    code = "import sys; from tests.runtime import test_collectives as t; t._rank(int(sys.argv[1]), sys.argv[2])"
    command = [sys.executable, "-c", code]
    processes = [forkserver.Popen([*command, str(rank), str(folder)], cwd=forkserver.ROOT) for rank in (0, 1)]
    assert [process.wait(120) for process in processes] == [0, 0]
    return [torch.load(folder / str(rank)) for rank in (0, 1)]


@pytest.mark.whole
def test_hosts_tell_each_other(ranks):
    for rank in ranks:
        for time in ("once", "again"):  # the second time in other process groups
            assert rank[time] == [*[15, True, False] * 2, "of rank 0", "of rank 1"]


@pytest.mark.whole
def test_the_largest_elements_of_all_ranks(ranks):
    assert [rank["world"] for rank in ranks] == [(0, 2), (1, 2)]
    for rank in ranks:
        assert rank["several"]
        assert rank["maximum"] == [1.0, 5.0]


@pytest.mark.whole
def test_items_are_computed_by_one_rank_each(ranks):
    whole = torch.ones(3, 2)
    assert collectives.divided(whole, torch.neg).tolist() == (-whole).tolist()  # a single process
    assert [found["divided"] for found in ranks] == [
        [([1], True), ([2], True), ([3], True)],
        [([], True), ([2], True), ([2], True)],
    ]


def test_gradients_become_means_over_the_ranks(ranks):
    for rank in ranks:
        for (first, strided, none, last), dtype in zip(rank["means"], (torch.float32, torch.bfloat16), strict=True):
            assert first.tolist() == [1.5, 1.5]
            assert strided.tolist() == [[0.5, 3.5], [1.5, 4.5], [2.5, 5.5]]
            assert none is None
            assert last.dtype == torch.float32
            assert last.tolist() == torch.full((4,), 1.001).to(dtype).tolist()


@pytest.mark.whole
def test_ranks_agree_on_the_largest_magnitudes_and_the_smallest_scales(ranks):
    for rank in ranks:
        assert rank["agreed"]["scales.scaling_fwd.amax_history"][0].tolist() == [8]
        assert rank["agreed"]["scales.scaling_bwd.amax_history"][0].tolist() == [2]
        assert rank["scale"].tolist() == [E4M3 / 8, E5M2 / 2]
        assert rank["agreed"]["layer.scaling_fwd.scale"].tolist() == [2.0] * 3
        assert rank["agreed"]["layer.scaling_bwd.scale"].tolist() == [3.0] * 2
        history = rank["agreed"]["layer.scaling_bwd.amax_history"]
        assert history[:2].tolist() == [[3.0, 3.0], [float("inf"), 3.0]]


@pytest.mark.whole
def test_a_rank_without_memory_makes_all_begin_again_and_nothing_is_seen_of_it(ranks):
    one, other = (rank["micro-batching"] for rank in ranks)
    for number in (0, 1):  # after the calibration, after the step
        expected = one[2][number]
        for found in (one[4][number], other[2][number], other[4][number]):
            assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert {of[size][2] for of in (one, other) for size in (4, 2)} == {2}
    assert one[2][3] > 0


@pytest.mark.whole
def test_magnitudes_are_those_of_both_texts(ranks):
    """The ranks have seen different text, and alone would have other scales."""
    alone = []
    for rank in (0, 1):
        torch.manual_seed(0)
        engine = with_scales()
        engine.calibrate(ids(8, seed=rank, length=POSITIONS + 1), 2)
        alone.append(engine.model.scales.scale)
    assert not torch.equal(*alone)
    calibrated = ranks[0]["micro-batching"][2][0]
    assert calibrated["scales.scaling_fwd.scale"].tolist() == torch.minimum(*alone)[:1].tolist()

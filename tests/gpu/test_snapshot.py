"""Snapshots of tensors that are on a GPU, in memory that is locked for it."""

import copy

import pytest
import torch

from gpt2_fp8.checkpoint import tree
from gpt2_fp8.checkpoint.snapshot import Snapshots
from tests.runs import assert_equal

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]  # fmt: skip


@pytest.fixture
def state():
    weight = torch.randn(512, 300, device="cuda")
    return {
        "dtypes": {str(dtype): torch.randn(1000, device="cuda").to(dtype) for dtype in DTYPES},
        "tied": [weight, torch.nn.Parameter(weight), (weight.detach(),)],
        "views": [weight.t(), weight[3:, ::2], weight[7]],
        "conjugate": torch.randn(9, dtype=torch.complex64, device="cuda").conj(),
        "step": torch.tensor(5.0, device="cuda"), "empty": torch.empty(0, 3, device="cuda"), "host": torch.arange(4),
        "number": 7,
    }  # fmt: skip


@pytest.fixture
def snapshots():
    made = Snapshots()
    yield made
    made.close()


def plain(value):
    """Its tensors as bytes on the host, so that whatever is in them can be compared."""
    skeleton, tensors = tree.flatten(value)
    raw = {name: (str(t.dtype), tuple(t.shape), t.reshape(-1).view(torch.uint8).clone()) for name, t in tensors.items()}
    return [skeleton, raw]


def copies(copied):
    """Those that were on the GPU and are not empty."""
    return [*copied["dtypes"].values(), copied["tied"][0], *copied["views"], copied["conjugate"], copied["step"]]


def test_a_snapshot_is_bit_equal_and_in_locked_memory_which_is_unlocked_in_the_end(snapshots, state):
    for _ in range(3):  # it can be locked again
        snapshots.prepare(state)
        copied = snapshots.take(state)
        assert_equal(plain(copied), plain(state), "state")
        assert copied["tied"][0] is copied["tied"][1] is copied["tied"][2][0]
        assert all(t.is_pinned() and t.is_contiguous() and t.device.type == "cpu" for t in copies(copied))
        assert not copied["host"].is_pinned()
        snapshots.close()
        assert not any(t.is_pinned() for t in copies(copied))
        assert_equal(plain(copied), plain(state), "state")  # a snapshot that is held is still there


def test_training_that_goes_on_changes_no_snapshot_and_the_next_one_takes_its_place(snapshots, state):
    snapshots.prepare(state)
    before = copy.deepcopy(plain(state))
    large = torch.randn(1 << 26, device="cuda")
    large @ large  # the GPU is still at work when the snapshot is asked for
    state["tied"][0].mul_(2.0)
    state["tied"][0].div_(2.0)  # a power of two: the same bits again
    first = snapshots.take(state)
    for tensor in [*state["dtypes"].values(), state["tied"][0]]:
        tensor.detach().zero_()
    torch.cuda.synchronize()
    assert_equal(plain(first), before, "state")
    places = [t.data_ptr() for t in copies(first)]
    second = snapshots.take(state)
    assert [t.data_ptr() for t in copies(second)] == places
    assert_equal(plain(second), plain(state), "state")
    assert not second["tied"][0].any()


def test_unprepared_or_too_large_it_is_the_same_in_ordinary_memory(snapshots, state):
    unprepared = snapshots.take(state)
    assert_equal(plain(unprepared), plain(state), "state")
    assert not any(t.is_pinned() for t in copies(unprepared))
    snapshots.prepare({"step": state["step"]})
    large = torch.randn(1 << 20, device="cuda")
    mixed = snapshots.take([large, state])
    assert_equal(plain(mixed), plain([large, state]), "state")
    assert not mixed[0].is_pinned()
    assert mixed[1]["step"].is_pinned()


def test_memory_that_cannot_be_locked_leaves_no_error_behind(snapshots, state, monkeypatch, caplog):
    """The same pages a second time: CUDA itself refuses, in the thread."""
    from gpt2_fp8.checkpoint import snapshot

    register = snapshot.register

    def twice(memory, device):
        register(memory, device)
        try:
            register(memory, device)
        finally:
            snapshot.unregister(memory)

    monkeypatch.setattr(snapshot, "register", twice)
    snapshots.prepare(state)
    copied = snapshots.take(state)
    assert "ordinary memory, which is slower: " in caplog.text
    assert_equal(plain(copied), plain(state), "state")
    assert not any(t.is_pinned() for t in copies(copied))
    torch.ones(3, device="cuda").add_(1.0)  # a launch, which would find it
    torch.cuda.synchronize()


def test_memory_is_locked_while_the_gpu_and_another_graph_are_at_work(snapshots):
    """What checkpoints keep apart by time works side by side too, where a graph is recorded for its thread alone."""
    weights, x = torch.randn(64 << 20, device="cuda"), torch.ones(1024, device="cuda")
    snapshots.prepare(weights)
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x.add_(1.0)
        graph.replay()
    copied = snapshots.take(weights)
    assert copied.is_pinned()
    assert torch.equal(copied, weights.cpu())
    assert x[0].item() == 21.0

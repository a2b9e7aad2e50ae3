"""The copy of a run's state, and the page-locked memory it is made in; tensors here only say that they are on a GPU."""

import gc
import logging
import threading
from collections import OrderedDict

import pytest
import torch

from gpt2_fp8.checkpoint import files, snapshot, tree
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.snapshot import Snapshots
from gpt2_fp8.checkpoint.writer import Writer


def test_a_snapshot_writes_what_the_original_would_have_written():
    weight = torch.randn(4, 6, requires_grad=True)
    buffer = torch.arange(12.0)
    value = {
        "tied": [weight, torch.nn.Parameter(weight.detach()), (weight.detach(),)],
        "views": {"a": buffer[:6], "b": buffer[3:9], "transposed": weight.t()},
        "empty": torch.empty(0, 3),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "ordered": OrderedDict(x=1, y=[{"z": None}]),
        7: float("nan"),
    }
    (before, tensors), copied = tree.flatten(value), Snapshots().take(value)
    (after, copies) = tree.flatten(copied)
    assert str(after) == str(before)  # as text: NaN is not equal to itself
    assert tensors.keys() == copies.keys()
    assert all(torch.equal(tensors[name], copies[name]) for name in tensors)
    originals = {tensor.untyped_storage().data_ptr() for tensor in (weight, buffer, value["bf16"])}
    assert not originals & {tensor.untyped_storage().data_ptr() for tensor in copies.values()}
    assert copied["tied"][0] is copied["tied"][1] is copied["tied"][2][0]
    assert type(copied["ordered"]) is OrderedDict


# ---- page-locked memory ----------------------------------------------------------------------------------------------


class GPU:
    """Which tensors count as a GPU's, and the memory that was locked for it: [(address, bytes)]."""

    def __init__(self):
        self.storages, self.locked, self.unlocked, self.threads, self.waited = set(), [], [], [], 0

    def put(self, tensor):
        self.storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    def register(self, memory, device):
        self.threads.append(threading.current_thread())
        self.locked.append((memory.data_ptr(), memory.nbytes))

    def unregister(self, memory):
        self.unlocked.append((memory.data_ptr(), memory.nbytes))

    def synchronize(self):
        self.waited += 1

    def holds(self, tensor):
        """Whether a tensor is in locked memory, at an aligned place."""
        address = tensor.data_ptr()
        return address % 256 == 0 and any(at <= address < address + tensor.nbytes <= at + n for at, n in self.locked)


@pytest.fixture
def gpu(monkeypatch):
    gpu = GPU()
    real = torch.Tensor.is_cuda
    monkeypatch.setattr(
        torch.Tensor,
        "is_cuda",
        property(lambda self: real.__get__(self) or (self.layout == torch.strided and not self.is_meta
                                                     and self.untyped_storage().data_ptr() in gpu.storages)),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu)
    monkeypatch.setattr(snapshot, "register", gpu.register)
    monkeypatch.setattr(snapshot, "unregister", gpu.unregister)
    return gpu


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


@pytest.fixture
def state(gpu):
    """Several dtypes, a view of a part, a transposed one, a tied one, a number, an empty one; and one of the host's."""
    weight = gpu.put(torch.randn(40, 6))
    return {
        "dtypes": {str(dtype): gpu.put(torch.randn(7).to(dtype)) for dtype in DTYPES},
        "model": [weight, torch.nn.Parameter(weight), weight.t(), weight[3:, ::2]],
        "step": gpu.put(torch.tensor(5.0)),
        "empty": gpu.put(torch.empty(0, 3)),
        "host": torch.arange(4),
    }


def bits(value):
    """Every tensor of a nest, as bytes."""
    skeleton, tensors = tree.flatten(value)
    raw = {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    return str(skeleton), {name: (tensor.dtype, tensor.shape, raw[name]) for name, tensor in tensors.items()}


def on_gpu(copied):
    """The copies of the tensors that were a GPU's and have any elements."""
    return [*copied["dtypes"].values(), *copied["model"], copied["step"]]


def test_a_snapshot_lies_in_memory_that_a_thread_locked_and_so_does_the_next(gpu, state):
    snapshots = Snapshots()
    snapshots.prepare(state)
    before = bits(state)
    first = snapshots.take(state)
    assert bits(first) == before
    assert first["model"][0] is first["model"][1]
    assert all(gpu.holds(tensor) and tensor.is_contiguous() for tensor in on_gpu(first))
    assert not gpu.holds(first["host"])
    assert (len(gpu.locked), gpu.waited) == (1, 1)
    assert gpu.threads[0] is not threading.main_thread()
    places = [tensor.data_ptr() for tensor in on_gpu(first)]
    state["model"][0].detach().zero_()  # training goes on
    assert bits(first) == before
    second = snapshots.take(state)
    assert [tensor.data_ptr() for tensor in on_gpu(second)] == places
    assert bits(second) == bits(state) != before
    assert len(gpu.locked) == 1


def test_what_does_not_fit_is_copied_through_ordinary_memory(gpu, state):
    snapshots = Snapshots()
    unprepared = snapshots.take(state)
    assert bits(unprepared) == bits(state)
    assert all(tensor.is_contiguous() for tensor in on_gpu(unprepared))
    assert (gpu.locked, gpu.waited) == ([], 1)
    snapshots.prepare(state)
    large = gpu.put(torch.randn(2**20))
    for _ in range(2):
        copied = snapshots.take([large, state])
        assert bits(copied) == bits([large, state])
        assert not gpu.holds(copied[0])
        assert all(map(gpu.holds, on_gpu(copied[1])))
    assert len(gpu.locked) == 1


def test_where_no_pages_can_be_locked_one_line_says_so(gpu, state, monkeypatch, caplog):
    tried = []

    def refuse(memory, device):
        tried.append(device)
        raise RuntimeError("out of memory (cudaError.???)\nand more")

    monkeypatch.setattr(snapshot, "register", refuse)
    snapshots = Snapshots()
    with caplog.at_level(logging.WARNING, "gpt2_fp8"):
        for _ in range(2):  # two fits of a run
            snapshots.prepare(state)
            for _ in range(2):
                assert bits(snapshots.take(state)) == bits(state)
            snapshots.close()
    assert [record.message for record in caplog.records] == [
        "checkpoints are copied through ordinary memory, which is slower: out of memory (cudaError.???)"
    ]
    assert len(tried) == 1
    assert gpu.unlocked == []


def test_the_memory_is_given_back_and_a_snapshot_that_is_held_stays(gpu, state):
    snapshots = Snapshots()
    snapshots.prepare(state)
    copied = snapshots.take(state)
    snapshots.close()
    snapshots.close()
    assert gpu.unlocked == gpu.locked
    assert bits(copied) == bits(state)
    assert not any(map(gpu.holds, on_gpu(snapshots.take(state))))
    snapshots.prepare(state)  # the next fit
    snapshots.take(state)
    assert len(gpu.locked) == 2
    del snapshots, copied
    gc.collect()
    assert gpu.unlocked == gpu.locked  # also where nobody closes it


def test_the_writer_locks_for_its_thread_alone_and_gives_back_when_it_closes(gpu, state, tmp_path):
    checkpoint = {"state_dict": {"w": state["model"][0]}, "optimizer_states": [state["dtypes"]], "global_step": 3}
    for asynchronous in (False, True):
        writer = Writer(tmp_path / str(asynchronous), 1, asynchronous=asynchronous)
        writer.begin(None, None)
        writer.prepare(checkpoint)
        writer.save(checkpoint, Pointer("step-00000003", 3, None))
        writer.wait()
        assert (len(gpu.locked), len(gpu.unlocked)) == (asynchronous, 0)
        writer.close()
        assert gpu.unlocked == gpu.locked
        assert bits(files.read(writer.folder / "step-00000003")) == bits(checkpoint)

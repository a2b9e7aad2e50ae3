"""The copy of a run's state. In page-locked memory: tests/gpu/test_snapshot.py."""

import logging
from collections import OrderedDict

import torch

from gpt2_fp8.checkpoint import snapshot, tree
from gpt2_fp8.checkpoint.snapshot import Snapshots


def test_a_snapshot_writes_what_the_original_would_have_written():
    weight = torch.randn(4, 6, requires_grad=True)
    buffer = torch.arange(12.0)
    value = {
        "tied": [weight, torch.nn.Parameter(weight.detach()), (weight.detach(),)],
        "views": {"a": buffer[:6], "b": buffer[3:9], "transposed": weight.t()}, "empty": torch.empty(0, 3),
        "bf16": torch.ones(2, dtype=torch.bfloat16), "ordered": OrderedDict(x=1, y=[{"z": None}]), 7: float("nan"),
    }  # fmt: skip
    (before, tensors), copied = tree.flatten(value), Snapshots().take(value)
    (after, copies) = tree.flatten(copied)
    assert str(after) == str(before)  # as text: NaN is not equal to itself
    assert tensors.keys() == copies.keys()
    assert all(torch.equal(tensors[name], copies[name]) for name in tensors)
    originals = {tensor.untyped_storage().data_ptr() for tensor in (weight, buffer, value["bf16"])}
    assert not originals & {tensor.untyped_storage().data_ptr() for tensor in copies.values()}
    assert copied["tied"][0] is copied["tied"][1] is copied["tied"][2][0]
    assert type(copied["ordered"]) is OrderedDict


def test_where_no_pages_can_be_locked_one_line_says_so(monkeypatch, caplog):
    """No GPU is needed to be refused; the memory is then ordinary."""

    def refuse(memory, device):
        raise RuntimeError("out of memory (cudaError.???)\nand more")

    monkeypatch.setattr(snapshot, "register", refuse)
    pinned = snapshot.Pinned()
    with caplog.at_level(logging.WARNING, "gpt2_fp8"):
        for _ in range(2):  # two fits of a run
            pinned.reserve(1000, torch.device("cuda", 0))
            pinned.rewind()
            assert pinned.empty_like(torch.ones(3)).shape == (3,)
            pinned.close()
    assert caplog.messages == [
        "checkpoints are copied through ordinary memory, which is slower: out of memory (cudaError.???)"
    ]

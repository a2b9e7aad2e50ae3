"""Out of memory: recognised in all its texts, and answered by a smaller size."""

import logging

import pytest
import torch

from gpt2_fp8.config.errors import SharedRefusal, UserError
from gpt2_fp8.config.run_length import largest_divisor
from gpt2_fp8.engine import out_of_memory
from gpt2_fp8.engine.out_of_memory import Fitting, is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
    ],
)
def test_every_text_of_it_is_recognised(error):
    assert is_out_of_memory(error)
    outer = ValueError("a step failed")
    outer.__cause__ = error
    assert is_out_of_memory(outer)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("out of memory"),  # no allocator says it so
        KeyboardInterrupt(),
    ],
)
def test_nothing_else_is_taken_for_it(error):
    assert not is_out_of_memory(error)


def test_sizes_stay_divisors():
    found = [largest_divisor(n, most) for n, most in ((64, 32), (96, 47), (30, 5), (9, 2), (7, 6), (96, 96))]
    assert found == [32, 32, 5, 1, 1, 96]


def full_above(limit, calls):
    def work(size):
        calls.append(size)
        if size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return size * 10

    return work


def test_the_size_falls_until_it_fits_and_stays_there(caplog):
    caplog.set_level(logging.WARNING)
    calls, forgotten = [], []
    fitting = Fitting(64, "micro_batch_size", 64)
    assert fitting(full_above(20, calls), lambda: forgotten.append(1)) == 160
    assert calls == [64, 32, 16]
    assert len(forgotten) == 2
    assert fitting(full_above(20, calls), lambda: forgotten.append(1)) == 160
    assert calls == [64, 32, 16, 16]
    assert ["micro_batch_size 32 instead of 64" in record.message for record in caplog.records] == [True, False]


def test_the_next_smaller_size_is_tried_also_after_one_has_fitted():
    calls = []
    fitting = Fitting(96, "micro_batch_size", 96)
    fitting(full_above(47, calls), lambda: None, proves_size=False)
    assert calls == [96, 48, 32], "divisors of the share"
    fitting(full_above(25, calls), lambda: None)
    assert calls[3:] == [32, 24], "that was not all that it is for"
    assert fitting.proven
    fitting(full_above(23, calls), lambda: None)
    assert calls[5:] == [24, 16], "memory became scarce in a later step"


def test_a_single_sequence_that_does_not_fit_ends_with_advice():
    with pytest.raises(UserError, match=r"micro_batch_size=1: CUDA out of memory(.|\n)*fix: activation_checkpointing"):
        Fitting(4, "micro_batch_size", 4)(full_above(0, []), lambda: None)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ((False, 7), "on rank 0 alone with micro_batch_size=8(.|\n)*fix: micro_batch_size=4 ckpt_path=last"),
        ((True, 6), "at another place on each rank"),
        ((True, 7), None),
    ],
)
def test_ranks_that_share_a_model_begin_again_together_or_end(monkeypatch, others, said):
    """Of two ranks, this one runs out of memory after the seventh collective."""
    monkeypatch.setattr(out_of_memory, "any_rank", bool)
    monkeypatch.setattr(out_of_memory, "everyones", lambda own: [own, others])
    calls = []
    fitting = Fitting(8, "micro_batch_size", 8, place=lambda: 7)
    if said is None:
        assert fitting(full_above(4, calls), lambda: None) == 40
        assert calls == [8, 4]
    else:
        with pytest.raises(SharedRefusal, match=said):
            fitting(full_above(4, calls), lambda: None)

"""What `compat.torch_private` expects of torch. What needs a GPU is in `tests/gpu/test_compat.py`."""

import inspect
import signal
from unittest import mock

import pytest
import torch
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous, registry
from torch.nn.attention import SDPBackend
from torch.optim.lr_scheduler import LambdaLR

from gpt2_fp8.compat import torch_private


def test_a_number_is_added_to_many_tensors_at_once():
    for number in (2, torch.tensor(2.0)):
        torch_private.add_to_all(counts := [torch.zeros(()), torch.ones(())], number)
        assert [tensor.item() for tensor in counts] == [2, 3]


@pytest.mark.parametrize("shape", [(48, 16), (16, 48)])
def test_muons_iteration_leaves_singular_values_near_1(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = torch.linalg.svdvals(torch_private.orthogonalize(matrix, 5).float())
    assert bool((found > 0.5).all())
    assert bool((found < 1.5).all())


def test_inductors_workers_can_be_started_ahead():
    """That they survive a signal is tried in `tests/engine/test_cuda_graphs.py`, by `start_compile_workers`."""
    from torch._inductor.async_compile import AsyncCompile

    inspect.signature(AsyncCompile.warm_pool).bind()  # no argument is needed


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_a_fused_optimizer_leaves_a_step_out(skipped):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    assert torch_private.skips_where(optimizer) is None
    for _ in range(2):  # it stays until it is set anew
        weight.grad = torch.full((4,), float("nan") if skipped else 1.0)
        torch_private.skip_where(optimizer, torch.tensor(skipped))
        optimizer.step()
    assert torch_private.skips_where(optimizer) == skipped
    assert bool((weight == 1).all()) == bool(skipped)
    assert optimizer.state[weight]["step"] == (0 if skipped else 2)
    assert torch.isfinite(optimizer.state[weight]["exp_avg"]).all()


def test_a_schedule_says_where_it_stands():
    steps = 7
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    saved = schedule.state_dict()
    counts = torch_private.scheduler_counts(steps, [0.5 / (1 + steps)])
    assert {name: saved[name] for name in counts} == counts


def test_cudnns_attention_is_there_under_the_arguments_of_cudnn_attention():
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    assert [a.name for a in schema.arguments[:7]] == [
        *("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),
    ]
    assert [result.name for result in schema.returns[:2]] == ["output", "logsumexp"]


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, SDPBackend.FLASH_ATTENTION), (0.1, SDPBackend.MATH)])
def test_chosen_attention_is_what_runs(dropout, expected):
    """On a CPU, which has a kernel without dropout: the choice is that of the operator in autograd's graph."""
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    assert SDPBackend(torch_private.chosen_attention(q, k, v, dropout, False)) == expected
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    assert ("Flash" in type(y.grad_fn).__name__) == (expected == SDPBackend.FLASH_ATTENTION)


@pytest.mark.parametrize(("is_fault", "left"), [(True, [2, 1, 0]), (False, [2])])
def test_rank_agent(monkeypatch, is_fault, left):
    """It starts its ranks again after a fault alone, and gives them time to save after a signal."""
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda: "")  # it reads sources for torch's log
    seen = []

    def judge(failures, restarts_left):
        seen.append(restarts_left)
        return is_fault

    handler = registry.get_rendezvous_handler(RendezvousParameters("c10d", "127.0.0.1:0", "run", 1, 1, "127.0.0.1"))
    spec = WorkerSpec(
        "rank", 1, handler, entrypoint="sh", args=("-c", "exit 7"), max_restarts=2, local_addr="127.0.0.1"
    )
    agent = torch_private.rank_agent(spec, judge, 600)
    assert [failure.exitcode for failure in agent.run().failures.values()] == [7]
    assert seen == left
    handler.shutdown()
    assert list(inspect.signature(PContext.close).parameters) == ["self", "death_sig", "timeout"]
    agent._pcontext = mock.Mock()
    agent._shutdown(signal.SIGINT)
    assert agent._pcontext.close.call_args_list[0] == mock.call(signal.SIGINT, 600)


def test_skip_on_host():
    """A plain optimizer refuses `found_inf`, and a fused one looks at it."""
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        torch_private.skip_on_host(optimizer)
        weight.grad = torch.ones(2)
        torch_private.skip_where(optimizer, torch.ones(()))
        optimizer.step()
        assert weight.tolist() == [1, 1]
        torch_private.skip_where(optimizer, torch.zeros(()))
        optimizer.step()
        assert weight.tolist() == [0, 0]


def test_a_layer_calls_the_hooks_of_another_until_they_are_removed():
    layer, made, seen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), []
    handles = [
        layer.register_forward_pre_hook(lambda *_: seen.append("before")),
        layer.register_forward_hook(lambda *_, **__: seen.append("after"), with_kwargs=True),
        layer.register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    torch_private.keep_hooks(layer, made)
    made(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert seen == ["before", "after", "backward"]
    for handle in handles:
        handle.remove()
    made(torch.ones(1, 2))
    assert len(seen) == 3

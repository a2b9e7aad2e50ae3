"""What `compat.fully_shard` expects of torch's FSDP2, in one process; of several, in `tests/train/test_fsdp.py`."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from gpt2_fp8.compat.fully_shard import count_collectives, reset_iteration
from gpt2_fp8.engine.average import WeightAverage


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def out_of_memory(*_):
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("own", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_after_a_pass_that_failed_the_next_is_as_ever(mesh, monkeypatch, own):
    if not own:
        monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.ones(2, 8)
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    reset_iteration(model)  # nothing was gathered yet
    assert [type(count) for count in count_collectives(mesh)] == [int]  # which gloo does not count

    def gradients():
        model.zero_grad()
        reset_iteration(model)
        model.zero_grad()
        model(x).sum().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    expected = gradients()
    for fails in (out_of_memory, lambda _, given: given[0].register_hook(out_of_memory) and None):
        handle = model[1].register_forward_pre_hook(fails)
        with pytest.raises(torch.OutOfMemoryError):
            model(x).sum().backward()
        handle.remove()
        assert all(map(torch.equal, gradients(), expected))


@pytest.mark.parametrize("reshard", [True, False])
def test_a_forward_takes_rows_that_were_exchanged_since_they_were_gathered(mesh, reshard):
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))), torch.ones(2, 8)
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    average, weights = WeightAverage(model, 0.5, 0), list(model.parameters())
    average.begin()
    before = model(x)
    before.sum().backward()
    with torch.no_grad():
        for weight in weights:
            weight.to_local().add_(1.0)
        after = model(x)
        with average.in_place():
            assert torch.equal(model(x), before)
        assert torch.equal(model(x), after)

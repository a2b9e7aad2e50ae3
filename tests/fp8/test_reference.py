"""The reference backend under torch.compile."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from gpt2_fp8 import compose
from gpt2_fp8.fp8.backends import Reference
from gpt2_fp8.model.gpt2 import initialise
from tests.runs import SMALL


@pytest.fixture
def reference():
    (config,) = compose.preflight([*SMALL, "precision=fp32", "data=text_files", "data.train_files=[README.md]"])
    return Reference(config, "fp32", "cpu")


def test_the_flag_of_fp8_weights_makes_no_further_graph(reference):
    model, graphs = reference.build(256), CompileCounter()
    initialise(model, seed=0)
    loss_of = torch.compile(lambda ids, flag, scale: reference.loss(model, ids, flag, scale), backend=graphs)
    ids = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    losses = {flag: loss_of(ids, flag, 1.0).item() for flag in (True, False, None)}
    assert len(set(losses.values())) == 1
    assert graphs.frame_count == 1

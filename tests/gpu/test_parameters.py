"""The parameters of the layers that only a GPU builds are those that the block's description has."""

from dataclasses import replace

import pytest

from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.model.gpt2 import padded_vocabulary
from gpt2_fp8.model.parameters import parameter_count, parameters
from tests.gpu.common import CONFIG, FAMILIES, VOCAB, build

pytestmark = pytest.mark.fp8


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_count(family, bias):
    config, rows = replace(CONFIG, bias=bias), padded_vocabulary(VOCAB)
    built = {name: tuple(p.shape) for name, p in build(family, config=config).named_parameters()}
    described = list(parameters(block_spec(config), config.n_layer, config.n_positions, rows))
    assert built == {p.name: p.shape for p in described}
    assert sum(p.numel for p in described) == parameter_count(config, rows)

from gpt2_fp8.engine.optim import build_optimizer
from tests.common import OPTIM, build


def test_only_matrices_decay():
    model = build()
    optimizer = build_optimizer(model, OPTIM)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, plain = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert all(name.endswith("weight") and "layer_norm" not in name for name in decayed)
    assert all("bias" in name or "layer_norm" in name for name in plain)
    assert sorted(decayed + plain) == sorted(names.values())
    assert decayed == sorted(decayed)

"""torchao's float8 product of a weight that another module owns. Holds for `torchao>=0.18,<0.19`.

Its public way replaces `nn.Linear` by a module of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

NOT_INSTALLED = 'torchao is not installed (pip install -e ".[torchao]")'


@cache
def why_not() -> str | None:
    """Return why torchao's float8 cannot be used; None if it can. It is imported to know."""
    try:
        import torchao.float8  # noqa: F401
    except ModuleNotFoundError as error:
        return NOT_INSTALLED if error.name == "torchao" else f"torchao does not load: {error}"
    except Exception as error:  # for example from a torch of another version
        return f"torchao does not load: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


class Float8Product:
    """x W^T in float8, forward and backward, as a `Float8LinearConfig` says.

    `weight_dtype`: what the weight is converted to first; None: the product takes it as it is.
    """

    def __init__(self, config: Any, weight_dtype: torch.dtype | None = None):
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        with torch.device("meta"):
            plain = nn.Linear(16, 16, bias=False)
        # The public function also works around a fault of Triton's compiler.
        converted: Any = convert_to_float8_training(plain, config=config)
        self.config, self.weight_dtype = config, weight_dtype
        self._products, self._function = converted.linear_mm_config, matmul_with_hp_or_float8_args

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b, bfloat16. x: [..., in_features], any float dtype; weight: [out_features, in_features]."""
        if self.weight_dtype is not None:
            weight = weight.to(self.weight_dtype)
        y = self._function.apply(x.to(torch.bfloat16), weight.t(), self._products, self.config)
        return y if bias is None else y + bias.to(y.dtype)

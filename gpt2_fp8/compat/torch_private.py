"""Parts of torch without a public name, each with the reason. Holds for `torch>=2.11,<2.14`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import _muon as muon

if TYPE_CHECKING:  # imported in a function: the agent's are many modules
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# One or two launches for hundreds of tensors: lists of equal length; a list and a number.
copy_all, divide_all = torch._foreach_copy_, torch._foreach_div_


def rank_agent(spec: WorkerSpec, is_fault: Callable[[Mapping[int, ProcessFailure], int], bool], seconds: int) -> Any:
    """Return torch's agent of the ranks of `spec`, which starts them again after a fault alone, and not after any end.

    Args:
        is_fault: of the failures by rank and the number of restarts left.
        seconds: that the ranks have to save and end after a signal. torch 2.11 and 2.12 know no such number.
    """
    from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            if result.is_failed() and not is_fault(result.failures, self._remaining_restarts):
                self._remaining_restarts = 0
            return result

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
            if self._pcontext:  # after a failure its processes have ended
                self._pcontext.close(death_sig, seconds)
            super()._shutdown(death_sig)

    return Agent(spec, DefaultLogsSpecs(log_dir=os.devnull))


def keep_hooks(layer: torch.nn.Module, made: torch.nn.Module) -> None:
    """Have `made` call the hooks of `layer`, as long as their handles are not removed."""
    for name, hooks in vars(layer).items():
        if name.startswith(("_forward_", "_backward_", "_is_full_backward_hook")) and hooks:
            setattr(made, name, hooks)


# The address of a device's current stream without a Stream object, which costs more than a launch. A torch without CUDA
# does not have it.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def start_compile_workers() -> None:
    """Start the processes in which Inductor compiles. It would start them in the middle of the first compile."""
    from torch._inductor.async_compile import AsyncCompile  # its import may start them

    AsyncCompile.warm_pool()


def skip_where(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Have a fused optimizer skip its next steps if `found_inf`, float32 with one element on its device, is 1."""
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def skips_where(optimizer: Optimizer) -> Tensor | None:
    """Return what `skip_where` has told an optimizer; None before it has."""
    return getattr(optimizer, "found_inf", None)


def skip_on_host(optimizer: Optimizer) -> None:
    """Have an optimizer that does not look at `found_inf` skip its steps by it. The host waits for the device then."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return
    step = optimizer.step

    def guarded(self: Optimizer, closure: Any = None) -> Any:  # bound, as a scheduler wants it
        found = vars(self).pop("found_inf", None)  # torch's own refuse to step while they have it
        if found is not None and found.item():
            return None if closure is None else closure()
        return step(closure)

    optimizer.step = MethodType(guarded, optimizer)  # type: ignore[method-assign]


def scheduler_counts(step: int, rates: Sequence[float | Tensor]) -> dict[str, Any]:
    """Return what a `LambdaLR` saves of its position: after `step` optimizer steps, at these learning rates."""
    return {"last_epoch": step, "_step_count": step + 1, "_last_lr": list(rates)}


MARK = "spin_kernel"


def mark_on_gpu() -> None:
    """Queue a kernel whose name has `MARK` in it: a place in a profile that no training has."""
    torch.cuda._sleep(1)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute causal attention by cuDNN, without a gradient. q, k, v: [batch, heads, tokens, head size], bfloat16.

    Returns a tensor like q, and what the public function does not: of each row the natural logarithm of its sum of
    exponentials, float32 [batch, heads, tokens, 1].
    """
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, compute_log_sumexp=True, dropout_p=0.0, is_causal=True
    )
    return out, lse


def chosen_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, shared: bool, mask: Tensor | None = None) -> int:
    """Return which kernel `scaled_dot_product_attention` would choose: a value of `torch.nn.attention.SDPBackend`.

    It is causal by itself or by `mask`. `shared`: keys serve several heads of queries.
    """
    return torch._fused_sdp_choice(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=shared
    )


def add_to_all(tensors: Sequence[Tensor], number: float | Tensor) -> None:
    """Add a number, which may be a scalar on the device, to each tensor in place: one or two launches for hundreds."""
    every = list(tensors)
    torch._foreach_add_(every, [number] * len(every) if isinstance(number, Tensor) else number)


MUON_COEFFICIENTS, MUON_EPS = (muon.DEFAULT_A, muon.DEFAULT_B, muon.DEFAULT_C), muon.EPS


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Compute Muon's Newton-Schulz iteration of a matrix: bfloat16 of its shape, with singular values near 1."""
    return muon._zeropower_via_newtonschulz(matrix, MUON_COEFFICIENTS, steps, MUON_EPS)

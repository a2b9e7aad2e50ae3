"""Kernels in Triton and CUDA C++, and direct calls of cuBLASLt, where no library offers what is needed."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata

import torch

from gpt2_fp8.kernels import cublaslt

PACKAGES = ("transformer_engine", "triton", "cuda-core", "flash-attn-4", "torchao")


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries whose kernels or compilers a GPU's work depends on, without missing ones.

    cuBLASLt's is one of them: another version may have another first choice of algorithm (`gemm`), which may round
    differently.
    """
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        if cudnn := torch.backends.cudnn.version():
            found["cudnn"] = format_version(cudnn)
        with suppress(RuntimeError, AttributeError):
            found["cublaslt"] = format_version(cublaslt.version())
    return found


def format_version(number: int) -> str:
    """Return the version of cuDNN or cuBLASLt with dots: 91900 -> 9.19.0; 130100 -> 13.1.0; 8907 -> 8.9.7."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"

"""Time the FP8 GEMMs of a model's layers through `gpt2_fp8/kernels/gemm.py`: a Markdown table of ms (TFLOP/s).

    python docs/studies/gemms.py --rows 65536

Medians of 20 calls in a row, by CUDA events. A call's operands are random, and the same in each: what the
second-level cache keeps of them is in the figures. Casts and transposes are not. The head has GPT-2's vocabulary unless
the model has its own, and comes in chunks of rows, as in training.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

import program
import torch
from torch import Tensor

from gpt2_fp8 import load_config
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.config.tokenizer_file import NAMES
from gpt2_fp8.kernels.gemm import matmul
from gpt2_fp8.measure import timing
from gpt2_fp8.measure.gemm import PASSES, Pass, fp8_operands, linear_widths, sizes
from gpt2_fp8.precision.support import NEEDED
from gpt2_fp8.runtime.arguments import Parser

CALLS, WARMUP = 20, 3


def main(argv: list[str] | None = None) -> int:
    """Print the table that the command line asks for. Returns the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default="gpt2", help="a choice of the group model")
    parser.add_argument("--rows", type=int, default=65536, help="micro-batch times context, a multiple of 16")
    try:
        options = parser.parse_args(sys.argv[1:] if argv is None else argv)
        if options.rows < 16 or options.rows % 16:
            raise UserError.of(f"--rows {options.rows} is no multiple of 16", "--rows 65536")
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < NEEDED:
            needed = ".".join(map(str, NEEDED))
            raise UserError.of(
                "torch sees no GPU with FP8 here", f"run it on one of compute capability {needed} or later"
            )
        model = load_config(f"model={options.model}").model
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    from gpt2_fp8.layers.head import CHUNK_ROWS  # not above: it imports Triton, which is where a GPU is

    ids = model.vocab_size or NAMES["gpt2"]
    print(table(replace(model, vocab_size=ids), options.rows, CHUNK_ROWS, "cuda"))
    return 0


def table(model: ModelConfig, rows: int, head_rows: int, device: str) -> str:
    """Time each layer's three GEMMs, and return them as Markdown. `head_rows`: those of the head, at most."""
    lines = ["| GEMM | forward | input gradient | weight gradient, added in place |", "|---|---|---|---|"]
    for (k, n), names in linear_widths([model]).items():
        layers = {name.rpartition(" ")[2] for name in names}
        m = min(rows, head_rows) if "head" in layers else rows
        added = bool(layers & {"projection", "fc2"})
        cells = [cell(kind, (m, k, n), added, model.bias and "head" not in layers, device) for kind in PASSES]
        name = f"{', '.join(sorted(layers))} {k:,} x {n:,}{', with the residual added' if added else ''}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(kind: Pass, layer: tuple[int, int, int], added: bool, biased: bool, device: str) -> str:
    """Time one GEMM of a layer of `layer` rows, inputs and outputs. Returns ms (TFLOP/s)."""
    size = sizes(kind, *layer)
    m, summed, n = size
    a, b = fp8_operands(kind, size, device)
    out = torch.zeros(m, n, dtype=torch.float32 if kind == "wgrad" else torch.bfloat16, device=device)
    one = torch.ones(1, device=device)
    bias = torch.zeros(n, dtype=torch.bfloat16, device=device) if biased and kind == "forward" else None
    add = out if kind == "wgrad" else torch.randn_like(out) if added and kind == "forward" else None

    def call() -> Tensor:
        return matmul(a, b.t(), out, one, one, bias=bias, add=add, fast_accumulate=kind == "forward")

    timing.seconds_of_each([call] * WARMUP, device)
    seconds = statistics.median(timing.seconds_of_each([call] * CALLS, device))
    return f"{1e3 * seconds:.3f} ({2e-12 * m * summed * n / seconds:,.0f})"


if __name__ == "__main__":
    program.run(main)

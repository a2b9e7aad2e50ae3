"""A model of a step's time on n GPUs: it prints the tables of docs/scale.md, measured rows first.

    python benchmarks/scale.py

A step takes as long as on the slowest GPU alone, and what is not hidden of the ranks' exchange. One GPU's time is
measured and linear in the sequences. The wires are measured inside a host, and assumed between hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log2, sqrt

HOST = 8  # GPUs
NVLINK = 322e9  # bytes/s, as NCCL counts them: four H200s reduce the gradients of 1.5B in 29.0 ms
NETWORK = 300e9  # assumed: eight links of 400 Gb/s a host, three quarters of them used
LATENCY = 30e-6  # assumed: s a collective, for each doubling of the hosts
COPY = 2.1e12  # bytes/s of gradients that are copied into buckets
BUCKET = 1 << 30  # bytes (engine/exchange.py)
EXPOSED = 0.42  # of FSDP's traffic: two H200s
SPREAD = 0.007  # standard deviation of the speed of equal GPUs


@dataclass(frozen=True)
class Model:
    """A model on one H200: ms of a step, of each micro-batch and of each sequence."""

    name: str
    parameters: float
    tokens: int  # of a sequence
    micro_batch: int  # sequences, at most
    step: float
    part: float
    sequence: float
    fsdp: bool = False

    def parts(self, sequences: float) -> int:
        """Return the number of micro-batches."""
        return max(1, -(-int(sequences) // self.micro_batch))

    def alone(self, sequences: float) -> float:
        """Return the seconds of a step on one GPU."""
        return (self.step + self.parts(sequences) * self.part + sequences * self.sequence) / 1e3


GPT2 = Model("GPT-2 124M", 124.5e6, 1024, 64, 1.4, 1.0, 1.135)
GPT2_XL = Model("GPT-2 1.5B", 1557.7e6, 1024, 16, 11, 2, 12.77)
LLAMA_8B = Model("Llama 3 8B, FSDP", 8030e6, 8192, 1, 0, 0, 592, fsdp=True)


@dataclass(frozen=True)
class Row:
    """`sequences` a step on n GPUs. `speed`: measured tokens/s; 0 if they were not."""

    model: Model
    n: int
    sequences: int
    speed: float = 0.0

    def predict(self) -> float:
        """Return tokens/s."""
        return self.sequences * self.model.tokens / step(self.model, self.n, self.sequences / self.n)

    def share(self) -> float:
        """Return the predicted speed as a share of n times one GPU's that computes the same step."""
        return self.model.alone(self.sequences) / step(self.model, self.n, self.sequences / self.n) / self.n


MEASURED = (
    Row(GPT2, 4, 512, 3_458_036),
    Row(GPT2, 4, 256, 3_428_891),
    Row(GPT2, 4, 64, 2_783_368),
    Row(GPT2_XL, 4, 64, 273_197),
    Row(GPT2, 2, 128, 1_708_709),
    Row(GPT2, 2, 32, 1_414_684),
    Row(GPT2_XL, 2, 32, 138_749),
    Row(LLAMA_8B, 2, 2, 26_021),
)


def exchange(model: Model, n: int, parts: int) -> float:
    """Return the seconds for which n GPUs wait for each other's weights and gradients."""
    if n == 1:
        return 0.0
    hosts = -(-n // HOST)
    speed = NVLINK if hosts == 1 else min(NVLINK, NETWORK)
    if model.fsdp:  # in each micro-batch bfloat16 weights are gathered twice, and float32 gradients reduced
        return EXPOSED * parts * (n - 1) / n * (2 + 2 + 4) * model.parameters / speed
    size = 4 * model.parameters
    return 2 * (n - 1) / n * size / speed + min(size, BUCKET) / COPY + LATENCY * log2(hosts) * -(-size // BUCKET)


def slowest(n: int) -> float:
    """Return by how much the slowest of n equal GPUs is slower than their mean: about sqrt(2 log n) deviations."""
    return 1 + SPREAD * sqrt(2 * log(n)) if n > 1 else 1.0


def step(model: Model, n: int, sequences: float) -> float:
    """Return the seconds of a step of `sequences` on each of n GPUs. `alone` is that of the slowest of four."""
    return model.alone(sequences) * slowest(n) / slowest(4) + exchange(model, n, model.parts(sequences))


def main() -> None:
    """Print the measured rows beside the model's, and its predictions."""
    for row in MEASURED:
        error = row.predict() / row.speed - 1
        print(f"| {row.model.name} | {row.n} | {row.sequences} | {row.speed:,.0f} | {error:+.1%} |")
    for model, sequences in ((GPT2, 512), (GPT2_XL, 1024), (LLAMA_8B, 1024)):
        rows = [Row(model, n, sequences) for n in (8, 16, 32, 64, 128, 256, 512, 1024)]
        shown = [f"{row.predict() / 1e6:.2f} M, {row.share():.0%}" if row.n <= sequences else "-" for row in rows]
        print(f"| {model.name}, {sequences * model.tokens / 1e6:.1f} M tokens | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()

"""What the benchmark measures beside its cases: GEMMs, attention, other programs. Each runs in a child process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.measure import table
from gpt2_fp8.measure.record import Record, name
from gpt2_fp8.measure.subprocesses import section
from gpt2_fp8.measure.table import Measured, Row


def measure_sections(record: Record, configs: list[RunConfig]) -> None:
    """Measure the sections that were asked for, and add them to `record`, whose cases have `configs`."""
    bench = record.bench
    models = [_with_vocabulary(config) for config in {config.model.name: config for config in configs}.values()]
    size = max(bench.micro_batch_size)
    if bench.gemm:
        _section(record, "Matrix products", "gemm", {"models": models, "rows": size * models[0]["n_positions"]})
    if bench.attention:
        _section(record, "Attention", "attention", {"models": models, "micro_batch_size": size})
    if bench.peers:
        for measured in {measured.work: measured for measured in reversed(record.cases)}.values():
            _peers(record, measured)


def _with_vocabulary(config: RunConfig) -> dict[str, Any]:
    """Return a model's settings with its vocabulary size: its own, or else the tokenizer's."""
    return asdict(config.model) | {"vocab_size": vocabulary(config)}


def _peers(record: Record, measured: Measured) -> None:
    """Measure other programs on a case's model and micro-batch, relative to our bf16."""
    base = table.baseline(measured, record.cases)
    ours = base.result.tokens_per_second if base else None

    def beside_ours(row: Row) -> Row:
        rate = row.get("tokens_per_second")
        return {"work": name(measured), **row, "x bf16": rate / ours if rate and ours else None}

    request = {"config": asdict((base or measured).config), "steps": record.bench.steps}
    _section(record, "Other programs", "peers", {**request, "warmup": record.bench.warmup}, beside_ours)


def _section(
    record: Record, title: str, module: str, request: dict[str, Any], as_row: Callable[[Row], Row] = dict
) -> None:
    """Add a section's rows to those under its title; if it is stopped, the rows so far."""

    def add(rows: list[Row]) -> None:
        record.sections.setdefault(title, []).extend(map(as_row, rows))
        record.keep()

    print(f"{module} ... ", end="", flush=True)
    log = record.folder / "logs" / f"{module}.log"
    rows = section(module, request, record.bench.timeout, log, stopped=add)
    add(rows)
    print("done" if any(row.get("status", "ok") == "ok" for row in rows) else "nothing to show", flush=True)

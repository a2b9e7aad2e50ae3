"""The benchmark: full training steps of several models, precisions and micro-batches, each in a separate process.

    python -m gpt2_fp8.bench
    python -m gpt2_fp8.bench 'bench.model=[gpt2,gpt2_medium]' 'bench.recipe=[delayed,current]'

Bad input is refused before torch is imported. What was measured until a stop is written.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.compose import benchmark
from gpt2_fp8.compose.benchmark import BenchConfig
from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.config.keys import meanings, show
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import table
from gpt2_fp8.measure.case import WAITS, Case, Kernel, Result, measure
from gpt2_fp8.runtime import programs

Row = dict[str, Any]
FOLDER = Path("outputs/bench")
HELP = """\
Measures full training steps: every combination of the four lists, one process a case, one after the other.
Writes bench.json and bench.md to outputs/bench/DATE_TIME.

{keys}

A run's other keys hold for every case that has them: model.n_positions=2048, compile=false, precision.keep_bf16=[head]
(python -m gpt2_fp8.run --help lists the groups). The text is Python's own source, as bytes, so nothing is downloaded;
GPT-2's sizes keep their vocabulary of 50,257. The ratio is to bf16 under torch.compile on the same model and
micro-batch, which is measured too on a GPU.

Examples:
  python -m gpt2_fp8.bench
  python -m gpt2_fp8.bench 'bench.model=[gpt2,gpt2_medium]' 'bench.micro_batch_size=[4,64]'
  python -m gpt2_fp8.bench bench.profile=true

Flags: -cd FOLDER your own settings. Exit codes: 0 done; 1 no case finished, or nothing
could be written; 2 your input; 130, 141, 143 stopped."""


@programs.stoppable
@programs.exit_code
def main(argv: list[str]) -> None:
    """Run the command line `argv` (without the program's name)."""
    if programs.answer_questions(argv, help_text):
        return
    bench, configs, device = _request(argv)
    folder = FOLDER / f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
    (folder / "logs").mkdir(parents=True)
    record = Record(folder, asdict(bench), shlex.join([*benchmark.PROGRAM.command.split(), *argv]))
    if device == "cpu":
        why = "trainer=cpu" if configs[0].trainer.accelerator == "cpu" else "There is no GPU here"
        print(f"{why}: this measures the CPU, and says nothing about a GPU.")
    print(f"{len(configs)} cases of {bench.warmup} + {bench.steps} steps -> {folder}\n")
    try:
        _measure_cases(bench, record, configs)
        record.complete = True
    finally:
        if record.cases:
            for title, rows in record.tables().items():
                print(f"\n{title}{f' on {record.device}' if record.device else ''}\n\n{table(rows)}")
            record.write()
            print(f"\n{folder}: bench.json, bench.md")
    if not any(measured.result.status == "ok" for measured in record.cases):
        raise RunError("error: no case finished")


def help_text() -> str:
    """Return the text of `--help`."""
    gpu, cpu = benchmark.defaults(gpu=True), benchmark.defaults(gpu=False)
    rows: list[Row] = [
        {"key": f"bench.{key}", "on a GPU": show(gpu[key]), "on a CPU": show(cpu[key]), "what it is": about}
        for key, about in meanings(BenchConfig).items()
    ]
    return HELP.format(keys=table(rows))


def _request(argv: list[str]) -> tuple[BenchConfig, list[RunConfig], str]:
    if found := disk.check_folder(FOLDER, "outputs/bench"):
        raise UserError(found)
    likely = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))
    bench, configs = benchmark.preflight(argv, likely)
    from gpt2_fp8.runtime import devices  # imports torch

    device = devices.device(configs[0])
    if (device == "cuda") != likely:
        bench, configs = benchmark.preflight(argv, device == "cuda")
    return bench, configs, device


def _measure_cases(bench: BenchConfig, record: Record, configs: list[RunConfig]) -> None:
    """Measure each case in turn. The files are written after each, so an early end loses nothing."""
    for number, config in enumerate(configs, 1):
        case = Case(config=config, steps=bench.steps, warmup=bench.warmup, profile=bench.profile)
        words = [f"{config.model.name}, micro-batch {config.micro_batch_size}", config.precision.name]
        words += [config.recipe.name] if config.precision.name.startswith("fp8") else []
        words += [config.optimizer.name] if config.optimizer.name != "adamw" else []
        named = f"{config.notes}: " if config.notes else ""
        print(f"[{number}/{len(configs)}] {named}{', '.join(words)} ... ", end="", flush=True)
        log = record.folder / "logs" / f"case-{number}.log"
        result = measure(case, bench.timeout, log)
        record.cases.append(Measured(case, result))
        record.write()
        told = why_not(result)
        if result.tokens_per_second is not None:
            layers = f"{result.backend}{', compiled' if result.compiled else ''}"
            told = f"{result.tokens_per_second:,.0f} tokens/s ({result.ran}, {layers})"
        print(told + (f" ({log})" if result.status == "failed" else ""), flush=True)


# ---- what is written and printed -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A case and its result."""

    case: Case
    result: Result

    @property
    def config(self) -> RunConfig:
        """The configuration that was trained."""
        return self.case.config

    @property
    def work(self) -> tuple[str, int]:
        """Model and micro-batch: cases with the same work can be compared."""
        return self.config.model.name, self.config.micro_batch

    @property
    def recipe(self) -> str | None:
        """The scaling recipe that was asked for; None if the precision has none."""
        return self.config.recipe.name if self.config.precision.name.startswith("fp8") else None


def ratio(measured: Measured, others: Sequence[Measured]) -> float | None:
    """Compute tokens per second relative to bf16's on the same work, preferably compiled; None if not measured."""
    same = [other for other in others if other.work == measured.work and other.result.tokens_per_second]
    found = [other for other in same if other.config.precision.name == other.result.ran == "bf16"]
    return times(measured, max(found, key=lambda other: bool(other.result.compiled))) if found else None


def times(measured: Measured, base: Measured) -> float | None:
    """Compute tokens per second relative to those of `base`; None if one of them has no figure."""
    own, other = measured.result.tokens_per_second, base.result.tokens_per_second
    return None if own is None or not other else own / other


def case_rows(every: Sequence[Measured]) -> list[Row]:
    """Return a row for each case; a note says what went wrong or ran instead. `bench.rows` has ratios of its own."""
    rows = []
    for place, measured in enumerate(every):
        config, result = measured.config, measured.result
        micro_batches = config.global_batch_size // config.micro_batch
        row: Row = {"row": config.notes} if config.notes else {}
        row |= {
            "model": config.model.name,
            "micro-batch": f"{config.micro_batch} x {micro_batches}",
            "precision": config.precision.name,
            "recipe": measured.recipe,
            "optimizer": "" if config.optimizer.name == "adamw" else config.optimizer.name,
            "layers": result.layers,
            "attention": result.attention if config.attention != "auto" else "",
            "tokens/s": _form(result.tokens_per_second, ",.0f"),
            "slowest": _form(result.slowest, ",.0f"),
            "fastest": _form(result.fastest, ",.0f"),
            "x bf16": "" if config.notes else _form(ratio(measured, every), ".3f"),
            "x first": _form(times(measured, every[0]), ".3f") if config.notes else "",
            "x before": _form(times(measured, every[max(0, place - 1)]), ".3f") if config.notes and place else "",
            "mfu_bf16": _form(result.mfu_bf16, ".3f"),
            "GiB": _form(result.peak_memory_gb, ".1f"),
            f"loss, step {len(result.losses)}": _form(result.losses[-1] if result.losses else None, ".4f"),
            "note": _note(result, config.precision.name),
        }
        rows.append(row)
    return rows


def why_not(result: Result) -> str:
    """Say why a case has no figures, and what the user can do about it."""
    why = f"{result.status}: {result.message}" if result.message else result.status
    return f"{why} (fix: {result.remedy})" if result.remedy else why


def kernel_rows(result: Result, count: int = 15) -> list[Row]:
    """Return rows of the kernels that a step's time goes to, the longest first, and what a GPU waits between them."""

    def row(name: str, kernels: Sequence[Kernel]) -> Row:
        time, share, calls = (sum(getattr(k, of) for k in kernels) for of in ("milliseconds", "share", "calls"))
        return {"ms": f"{time:.3f}", "share": f"{share:.1%}", "calls": calls, "kernel": name}

    kernels = [kernel for kernel in result.profile if kernel.name != WAITS]
    rows = [row(kernel.name, [kernel]) for kernel in kernels[:count]]
    if rest := kernels[count:]:
        rows.append(row(f"{len(rest)} others", rest))
    return rows + [row(WAITS, [kernel]) for kernel in result.profile if kernel.name == WAITS]


def _form(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _note(result: Result, asked: str) -> str:
    if result.status != "ok":
        return why_not(result)
    return f"ran {result.ran}: {result.reason}" if result.reason and result.ran != asked else ""


@dataclass
class Record:
    """A benchmark's settings by key, and the results so far."""

    folder: Path
    bench: dict[str, Any]
    command: str  # that measures the same again
    cases: list[Measured] = field(default_factory=list)
    complete: bool = False
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def device(self) -> str | None:
        """The device that was measured, once a case has named it."""
        return next((m.result.device for m in self.cases if m.result.device), None)

    def tables(self) -> dict[str, list[Row]]:
        """Return every table by its title: the cases and their profiles."""
        found = {"Training steps": case_rows(self.cases)} if self.cases else {}
        for measured in self.cases:
            if rows := kernel_rows(measured.result):
                model, size = measured.work
                words = [measured.config.precision.name, measured.recipe, measured.result.layers]
                name = measured.config.notes or ", ".join(filter(None, words))
                found[f"Kernels of a step: {model}, micro-batch {size} ({name})"] = rows
        return found

    def write(self) -> None:
        """Replace `bench.json` and `bench.md` with the results so far. Raises OSError."""
        versions = next((m.result.versions for m in self.cases if m.result.versions), {})
        cases = []
        for measured in self.cases:
            is_row = bool(measured.config.notes)  # of `bench.rows`
            relative = times(measured, self.cases[0]) if is_row else ratio(measured, self.cases)
            told = {"result": asdict(measured.result), "ratio_to_first" if is_row else "ratio_to_bf16": relative}
            cases.append(asdict(measured.case) | told)
        found = {
            "command": self.command, "started": self.started, "complete": self.complete, "device": self.device,
            "versions": versions, "bench": self.bench, "cases": cases,
        }  # fmt: skip
        durable.write_json(self.folder / "bench.json", durable.replace_nonfinite(found))
        about = ", ".join(f"{name} {version}" for name, version in versions.items())
        parts = [f"`{self.command}`", f"{self.device}; {about}" if self.device else ""]
        parts += [f"## {title}\n\n{table(rows)}" for title, rows in self.tables().items() if rows]
        durable.write_text(self.folder / "bench.md", "\n\n".join(filter(None, parts)) + "\n")


if __name__ == "__main__":
    sys.exit(programs.main("bench", main))

"""The benchmark: full training steps of several models, precisions and micro-batches, each in a separate process.

    python -m gpt2_fp8.bench
    python -m gpt2_fp8.bench 'bench.model=[gpt2,gpt2_medium]' 'bench.recipe=[delayed,current]'

Bad input is refused before torch is imported. Exit codes: 0 done; 1 no case finished, or the files could not be
written; 2 the input; 130 stopped by SIGINT; 143 by SIGTERM, SIGHUP or SIGQUIT; 141 the reader of its output has ended
(`| head`). What was measured until then is written.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from gpt2_fp8.compose import benchmark
from gpt2_fp8.compose.benchmark import BenchConfig
from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.config.keys import meanings, show
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import table
from gpt2_fp8.measure.case import Case, measure
from gpt2_fp8.measure.record import Measured, Record, Row, why_not
from gpt2_fp8.runtime import programs, signals

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


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    with signals.handle_signals() as handlers:
        try:
            with handlers.at_once():
                return programs.end(programs.exit_code(lambda: _bench(argv)))
        except BaseException:  # what was interrupted may have failed for that
            if handlers.received is None:
                raise
            print("stopped", file=sys.stderr)
        return 128 + handlers.received


def _bench(argv: list[str]) -> None:
    if programs.answered(argv, help_text):
        return
    bench, configs, device = _request(argv)
    folder = FOLDER / f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
    (folder / "logs").mkdir(parents=True)
    record = Record(folder, asdict(bench), shlex.join([*benchmark.PROGRAM.command.split(), *argv]))
    if device == "cpu":
        why = "trainer=cpu" if configs[0].trainer.accelerator == "cpu" else "There is no GPU here"
        print(f"{why}: this measures the CPU, and says nothing about a GPU.")
    print(f"{len(configs)} cases of {bench.warmup} + {bench.steps} steps -> {record.folder}\n")
    try:
        _measure_cases(bench, record, configs)
        record.complete = True
    finally:
        _end(record)
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
    """Return the settings, the cases and the device. Raises UserError."""
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


def _end(record: Record) -> None:
    """Print the tables, write the files, and say where they are."""
    if not record.cases:
        return
    for title, rows in record.tables().items():
        print(f"\n{title}{f' on {record.device}' if record.device else ''}\n\n{table(rows)}")
    record.write()
    print(f"\n{record.folder}: bench.json, bench.md")


if __name__ == "__main__":
    sys.exit(programs.main("bench", main))

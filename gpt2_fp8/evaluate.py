"""The evaluation of a trained model: loss, perplexity and bits per byte on any text, in any precision.

    python -m gpt2_fp8.evaluate ckpt_path=outputs/first
    python -m gpt2_fp8.evaluate ckpt_path=outputs/first data=text_files data.train_files='[corpus/*.txt]' precision=fp32

Exit codes: 0 done; 1 the results could not be written; 2 the input; 3 the loss is not finite; 4 the source of the text
was lost; 130 stopped by SIGINT; 141 the reader of its output has ended.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from gpt2_fp8.compose import evaluation
from gpt2_fp8.compose.commandline import list_keys
from gpt2_fp8.config.programs import EvaluateConfig
from gpt2_fp8.config.shown import line
from gpt2_fp8.runtime import programs

HELP = """\
Evaluates a trained model on the text that it was validated with, or on any other: loss, perplexity, bits per byte.

{keys}

A run's keys change what the checkpoint was trained with: the groups {groups}, and
{others}. The model and its tokenizer are the checkpoint's.

Examples:
  python -m gpt2_fp8.evaluate ckpt_path=outputs/first
  python -m gpt2_fp8.evaluate ckpt_path=outputs/first checkpoint=best precision=fp32 data.val_sequences=1000
  python -m gpt2_fp8.evaluate ckpt_path=outputs/first data=fineweb ranking=hellaswag_val.jsonl out=result.json

docs/evaluate.md says more. Exit codes: 0 done; 1 out could not be written; 2 your input; 3 the loss is not finite;
4 the data source was lost; 130, 141 stopped."""
_LINES = {
    "loss": "{:.6f} nats a token", "perplexity": "{:.4f}", "bits_per_byte": "{:.6f}", "tokens": "{:,}", "bytes": "{:,}",
    "seconds": "{:.2f}", "tokens_per_second": "{:,.0f}", "peak_memory_gb": "{:.2f} GiB",
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    if programs.answered(argv, help_text):
        return 0
    return programs.exit_code(lambda: _evaluate(argv))


def help_text() -> str:
    """Return the text of `--help`."""
    groups, others = ", ".join(evaluation.GROUPS), ", ".join(evaluation.KEYS)
    return HELP.format(keys=list_keys(EvaluateConfig), groups=groups, others=others)


def _evaluate(argv: list[str]) -> None:
    request = evaluation.read_words(argv)
    from gpt2_fp8.train import trained  # imports torch
    from gpt2_fp8.train.evaluation import evaluate

    assert request.own.ckpt_path is not None, "checked before"
    found = trained.load(request.own.ckpt_path, request.own.checkpoint)
    config = evaluation.configuration(request, found.config)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results = evaluate(found, config, request.own)
    if request.own.out is not None:
        programs.to_write(request.own.out).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for text in _told(results):
        print(line(text))


def _told(results: dict[str, Any]) -> list[str]:
    """Return the lines that are printed."""
    reason = f" instead of {results['asked']}: {results['reason']}" if results["reason"] else ""
    apart = "" if results["evaluation"] == results["precision"] else f", evaluation {results['evaluation']}"
    said = [
        f"{'checkpoint':<18} {results['checkpoint']}",
        f"{'precision':<18} {results['precision']}{apart}{reason}",
        f"{'layers':<18} {results['kernels']['layers']}, on {results['device']}",
        f"{'data':<18} {results['data']}, {results['sequences']:,} sequences",
    ]
    for name, form in _LINES.items():
        shown = name.removesuffix("_gb")
        said.append(f"{shown:<18} {'none' if results[name] is None else form.format(results[name])}")
    said += [f"{'loss of ' + name:<18} {loss:.6f}" for name, loss in results.get("sources", {}).items()]
    if ranking := results.get("ranking"):
        said.append(f"{'ranking':<18} {ranking['items']:,} items")
        said += [f"{name:<18} {ranking[name]:.4f} ± {ranking[name + '_stderr']:.4f}" for name in ("acc", "acc_norm")]
    return said


if __name__ == "__main__":
    sys.exit(programs.main("evaluate", main))

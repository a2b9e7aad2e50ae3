"""Faults 75 and 76: settings that make no sense end with 2 and two lines each, before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.hub_runs import ROOT

SENSELESS = {  # fault 75
    "model.n_embd=100 model.n_head=3 precision=bf16": "model.n_embd",
    "model.n_embd=100": "FP8 matrix products need a multiple of 16",
    "model.n_head=0": "must be at least 1",
    "model.n_layer=0": "must be at least 1",
    "model.dropout=1.5": "must be at least 0 and below 1",
    "model.dropout=-0.1": "must be at least 0 and below 1",
    "trainer.max_steps=20 optim.warmup_steps=50": "the warm-up is longer than the run",
    "global_batch_size=12": "does not divide",
    "micro_batch_size=0": "must be at least 1",
    "optim.beta2=1": "must be at least 0 and below 1",
    "optim.min_lr_ratio=2": "must be from 0 to 1",
    "data.tokenizer=gpt2 model.vocab_size=50000": "the tokenizer has 50257 tokens",
    "callbacks.keep_checkpoints=0": "must be at least 1",
    "callbacks.divergence_sigma=-1": "must be at least 0",
}
MISTYPED = {  # fault 76
    "optim.learing_rate=1e-3": "there is no key optim.learing_rate",
    "modle=gpt2": "there is no key modle",
    "model=gpt2_huge": "there is no such choice",
    "+unknown=1": "there is no key unknown",
    "+trainer.unknown=1": "there is no key trainer.unknown",
    "++optim.momentum=0.9": "there is no key optim.momentum",
    "optim.lr=nan": "not a finite number",
    "optim.lr=inf": "not a finite number",
    "optim.lr=fast": "must be a number",
    "optim.lr=null": "must be a number",
    "trainer.max_steps=1e4": "must be a whole number",
    "trainer.max_steps=true": "must be a whole number",
    "model.bias=yes_please": "must be true or false",
    "precision=fp7": "there is no such choice",
    "precision.fallback=maybe": "must be allow or error",
    "data.train_files=x": "data.train_files belongs to",
    "~optim.lr": "every key has a value",
    "optim.lr": "optim.lr cannot be read",
    "--lr 1": "--lr",
}
PROGRAM = """
import contextlib, io, json, sys
from gpt2_fp8 import run

for line in json.loads(sys.argv[1]):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = run.main(line.split())
    print(json.dumps([code, stderr.getvalue()]))
print(json.dumps(sorted({"torch", "lightning", "transformer_engine", "numpy"} & set(sys.modules))))
"""
TABLE = SENSELESS | MISTYPED
Ends = tuple[dict[str, tuple[int, str]], list[str], Path]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How each line ends, what heavy modules were imported by all of them, and the folder they ran in."""
    folder = tmp_path_factory.mktemp("mistakes")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([*TABLE])],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *told, heavy = map(json.loads, done.stdout.splitlines())
    return dict(zip(TABLE, told, strict=True)), heavy, folder


def check(end: tuple[int, str], cause: str) -> None:
    code, stderr = end
    assert code == 2, stderr
    assert stderr.startswith("error: ")
    assert cause in stderr


@pytest.mark.parametrize("line", SENSELESS)
def test_75_numbers_that_do_not_fit_together(ends: Ends, line: str) -> None:
    check(ends[0][line], SENSELESS[line])


@pytest.mark.parametrize("line", MISTYPED)
def test_76_a_typo_a_wrong_type_or_an_unknown_key(ends: Ends, line: str) -> None:
    check(ends[0][line], MISTYPED[line])


def test_76_nothing_was_imported_or_left_behind(ends: Ends) -> None:
    _, heavy, folder = ends
    assert heavy == []
    assert os.listdir(folder) == []

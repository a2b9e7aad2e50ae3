"""Kernels of attention that no machine can take for a run: each way out is taken."""

import itertools
import re
from dataclasses import replace

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import attention_support, backend_check
from gpt2_fp8.config.precision_schema import PlainPrecisionConfig
from gpt2_fp8.config.schema import AttentionKernel, RunConfig

BASES = {name: f"precision={name}" for name in ("bf16", "fp32", "fp8_hybrid")}
CHOICES = {
    "precision": tuple(BASES),
    "precision.backend": ("auto", "te", "torchao", "emulated", "reference"),
    "recipe": ("auto", "rowwise"),
    "attention": ("cudnn", "flash", "te", "sdpa"),
    "trainer.deterministic": (False, True),
    "document_mask": (False, True),
    "compile_mode": ("default", "reduce-overhead"),
}
PLAIN = ("bf16", "fp32")


def found(bases: dict[tuple[str, str], RunConfig], chosen: dict[str, str | bool]) -> list[tuple[str, str, str]]:
    """The key, cause and remedy of everything that is wrong with the backend and the attention of such words."""
    config = bases[chosen["precision"], "auto" if chosen["precision"] in PLAIN else chosen["recipe"]]
    precision = config.precision
    if chosen["precision"] in PLAIN:
        precision = PlainPrecisionConfig(name=chosen["precision"], backend=chosen["precision.backend"])
    else:
        precision = replace(precision, backend=chosen["precision.backend"])
    kernel: AttentionKernel = chosen["attention"]
    trainer = replace(config.trainer, deterministic=chosen["trainer.deterministic"])
    mask, mode = chosen["document_mask"], chosen["compile_mode"]
    changed = replace(
        config, precision=precision, attention=kernel, document_mask=mask, compile_mode=mode, trainer=trainer
    )
    findings = [*attention_support.check(changed), *backend_check.check(changed)]
    return [(one.keys[0], one.problem.cause, one.problem.remedy) for one in findings]


def test_every_way_out_of_every_kernel_is_taken():
    names = [(name, recipe) for name in BASES for recipe in CHOICES["recipe"]]
    bases = {(name, recipe): preflight([BASES[name], f"recipe={recipe}", "trainer=gpu"])[0] for name, recipe in names}
    refused = set()
    for values in itertools.product(*CHOICES.values()):
        chosen = dict(zip(CHOICES, values, strict=True))
        before = found(bases, chosen)
        for key, cause, remedy in before:
            if key != "attention":
                continue
            ways = re.findall(r"(?<![\w.=])([a-z][\w.]*)=([\w.]+)", re.sub(r"\(.*?\)", "", remedy))
            ways = [way for way in ways if way != ("trainer.deterministic", "true")]  # which is to be left out
            assert ways, remedy
            refused.add(cause)
            for name, value in ways:
                left = found(bases, chosen | {name: value})
                assert key not in [other for other, _, _ in left], (chosen, name, value)
                assert {other for other, _, _ in left} <= {other for other, _, _ in before}, (chosen, name, value)
    assert len(refused) == 8


def test_transformer_engines_attention_on_plain_layers_has_a_reason_and_what_does_the_same():
    (config,) = preflight(["precision=bf16"])
    (one,) = attention_support.check(replace(config, attention="te"))
    assert "plain-torch layers, which call torch's attention alone" in one.problem.cause
    assert "attention=cudnn (torch's call of cuDNN, which Transformer Engine calls too)" in one.problem.remedy
    assert "or precision.backend=te," in one.problem.remedy


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        (["model=gpt2"], "attention=cudnn"),
        (["model=gpt2", "model.n_embd=1008"], "attention=sdpa"),  # heads of 84
        (["model=gpt2", "model.n_head=1"], "attention=sdpa"),
        (["model=gpt2", "model.head_size=256"], "attention=cudnn"),
        (["model=gpt2", "model.head_size=60"], "attention=sdpa"),
    ],
    ids=str,
)
def test_cudnns_kernel_is_proposed_for_heads_that_it_takes(words, proposed):
    (config,) = preflight(["precision=bf16", *words])
    (one,) = attention_support.check(replace(config, attention="te"))
    assert re.split("[, ]", one.problem.remedy)[0] == proposed

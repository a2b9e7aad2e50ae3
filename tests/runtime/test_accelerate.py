"""Options of `accelerate launch` that this program does not follow are refused, or said."""

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime.accelerate import refused, unheard

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "False"}


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_a_model_that_would_be_divided_is_refused(name, monkeypatch):
    for variable, value in (LAUNCHED | {f"ACCELERATE_USE_{name}": "true"}).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(UserError) as found:
        preflight(["trainer.accelerator=cpu"])
    (problem,) = found.value.problems
    option = f"--use_{name.lower()}"
    assert problem.cause.startswith(f"accelerate launch {option}: here each process trains the whole model")
    assert problem.remedy.startswith(f"accelerate launch --multi_gpu without {option}")


def test_what_is_left_in_a_shell_or_false_is_not():
    assert not list(refused({"ACCELERATE_USE_FSDP": "true"}))
    assert not list(refused(LAUNCHED | {"ACCELERATE_USE_FSDP": "false"}))


@pytest.mark.parametrize(
    ("asked", "precision", "said"),
    [
        ("no", "fp8_hybrid", None),
        ("bf16", "bf16", None),
        ("fp8", "fp8_e4m3", None),
        ("bf16", "fp8_hybrid", "precision=bf16 would"),
        ("fp8", "bf16", "precision=fp8_hybrid would"),
        ("fp16", "fp32", "precision=bf16 would"),
    ],
)
def test_a_precision_that_does_nothing_is_said(asked, precision, said):
    found = list(unheard(LAUNCHED | {"ACCELERATE_MIXED_PRECISION": asked}, precision, "cuda"))
    assert len(found) == (said is not None)
    assert all(f"--mixed_precision={asked} changes nothing here" in line and line.endswith(said) for line in found)


def test_a_cpu_that_was_asked_for_is_said_on_a_gpu():
    environment = LAUNCHED | {"ACCELERATE_USE_CPU": "True"}
    assert list(unheard(environment, "bf16", "cuda")) == [
        "accelerate launch --cpu changes nothing here: trainer.accelerator=cpu would"
    ]
    assert not list(unheard(environment, "bf16", "cpu"))
    assert not list(unheard({}, "bf16", "cuda"))

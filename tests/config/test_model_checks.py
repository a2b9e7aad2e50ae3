"""A model's keys that do not fit each other: all mistakes at once, and each remedy is taken."""

import itertools
import re
from dataclasses import replace

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import model_checks, model_fits
from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.precision_schema import PlainPrecisionConfig

WIDTHS = {
    "n_embd": (48, 60, 64, 100),
    "n_head": (1, 3, 4, 12),
    "n_kv_head": (None, 1, 3, 5),
    "head_size": (None, 1, 4, 7, 20),
    "mlp_width": (None, 500),
    "positions": ("learned", "rope"),
}


def with_words(config, words):
    """The configuration after words that set a model's keys, or the precision."""
    for key, value in (word.split("=", 1) for word in words):
        if key == "precision":
            config = replace(config, precision=PlainPrecisionConfig(name=value, backend="auto"))
            continue
        name = key.removeprefix("model.")
        names = {"null": None, "rope": "rope", "learned": "learned"}
        typed = names[value] if value in names else float(value)
        typed = int(typed) if isinstance(typed, float) and typed.is_integer() else typed
        config = replace(config, model=replace(config.model, **{name: typed}))
    return config


def ways(remedy):
    found = [re.findall(r"(?:model\.\w+|precision)=[\w.+-]+", way) for way in remedy.split(", or ")]
    assert all(found), remedy
    return found


def follow(config):
    """Check that the first ways together mend all, and that each way alone mends its own problem and makes no new."""
    found = list(model_checks.check(config))
    together = with_words(config, [word for one in found for word in ways(one.problem.remedy)[0]])
    assert list(model_checks.check(together)) == [], (config.model, found)
    for one in found:
        for words in ways(one.problem.remedy):
            left = list(model_checks.check(with_words(config, words)))
            assert one not in left, (config.model, words)
            assert {other.keys for other in left} <= {other.keys for other in found}, (config.model, words, left)
    return len(found)


@pytest.mark.parametrize("line", ["recipe=delayed", "recipe=mxfp8", "precision=bf16"])
def test_every_remedy_of_every_model_is_taken(line):
    (base,) = preflight([line])
    numbers = [
        follow(replace(base, model=replace(base.model, **dict(zip(WIDTHS, values, strict=True)))))
        for values in itertools.product(*WIDTHS.values())
    ]
    assert 0 in numbers
    assert max(numbers) >= 2


ROTATIONS = {
    "positions": ("learned", "rope"),
    "rope_base": (None, 1e6),
    "rope_scaling": (None, 8.0),
    "rope_low_freq_factor": (None, 0.1, 1.0),
    "rope_high_freq_factor": (None, 0.5, 4.0),
    "rope_original_positions": (None, 4096),
    "head_size": (None, 7),
}


def test_every_remedy_of_rotations_is_taken():
    (base,) = preflight(["precision=bf16"])
    numbers = [
        follow(replace(base, model=replace(base.model, **dict(zip(ROTATIONS, values, strict=True)))))
        for values in itertools.product(*ROTATIONS.values())
    ]
    assert 0 in numbers
    assert max(numbers) == 3


@pytest.mark.parametrize("words", ["model.rope_scaling=null", "model.positions=learned", "model.positions=rope"])
def test_one_word_is_one_problem_that_names_no_key_as_typed(words):
    """Llama 3's file sets the keys of RoPE, which nobody typed: they are unset, not left out."""
    (base,) = preflight(["model=llama3_2_1b"])
    changed = with_words(base, [words])
    assert follow(changed) == (words != "model.positions=rope")
    assert "leave" not in " ".join(one.problem.remedy for one in model_checks.check(changed))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("model.head_size=20 model.n_head=3 model.n_embd=60", ["model.n_embd=48 model.head_size=16, or"]),
        ("model.head_size=20 model.n_head=3 model.n_embd=72", ["model.n_embd=64, or", "model.head_size=16, or"]),
        ("model=gpt2 model.n_embd=1000", ["model.n_embd=960", "model.n_embd=960, or"]),  # 1,008 has heads of 84
        ("model=llama3_small model.n_embd=1000", ["model.n_embd=1024", "model.n_embd=1024, or"]),  # 992 has heads of 62
        ("model=gpt2 model.n_head=13", ["model.n_embd=832, or model.n_head=12"]),
        ("model=gpt2 model.n_embd=864 model.n_head=10", ["model.n_embd=880, or model.n_head=9"]),
        ("model=gpt2 model.n_embd=100 model.n_head=48", ["model.n_embd=96", "model.n_embd=96, or"]),  # 384 is not near
        ("model=gpt2 model.head_size=99 model.n_kv_head=2", ["model.head_size=96, or"]),  # 100 is nearer
        ("model=gpt2 model.head_size=1", ["model.head_size=4, or"]),
        ("model.n_embd=100 model.mlp_width=500", ["model.n_embd=96, or", "model.mlp_width=496, or"]),
        ("model.n_head=12 model.n_kv_head=5 model.head_size=4", ["model.n_kv_head=4"]),
        ("model.n_head=12 model.n_kv_head=5 model.head_size=2", ["model.n_kv_head=4", "model.head_size=4, or"]),
    ],
)
def test_what_is_nearest_is_told(words, told):
    base, *changes = words.split() if words.startswith("model=") else ("model=tiny", *words.split())
    found = list(model_checks.check(with_words(preflight([base])[0], changes)))
    assert len(found) == len(told)
    assert all(one.problem.remedy.startswith(remedy) for one, remedy in zip(found, told, strict=True))


@pytest.mark.parametrize("model", ["tiny", "gpt2_optimized", "llama3_small", "llama3_2_1b"])
def test_a_shape_that_does_not_fit_has_the_options_of_one_that_does(model):
    """`in_any_shape` changes no option of a model that fits, and every other one is described."""
    (base,) = preflight([f"model={model}"])
    fitting = 0
    for values in itertools.product(*WIDTHS.values()):
        shaped = replace(base.model, **dict(zip(WIDTHS, values, strict=True)))
        options = block_spec(model_fits.in_any_shape(shaped)).options()
        try:
            expected = block_spec(shaped).options()
        except ValueError:
            continue
        fitting += 1
        assert options == expected, shaped
    assert fitting > 100

"""What is proposed for a model, its layers and its precision together is accepted when it is typed.

Drawn are odd shapes of several models under every backend, with keys that only some layers have. Each way out of a
problem must mend it and make no new one, and the first ways of all problems together must leave none.
"""

import random
import re
import shlex
from dataclasses import replace

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import attention_support, backend_check, checks, kept_check, model_checks
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.precision_schema import PlainPrecisionConfig

SHAPES = {
    "n_embd": (60, 72, 772, 1000),
    "n_head": (1, 3, 12),
    "n_kv_head": (None, None, 1, 5, 13),
    "head_size": (None, None, 20, 33),
    "mlp_width": (None, 500),
    "n_positions": (40, 96),
}
KEYS = {
    "precision.backend": ("auto", "fused", "te", "torchao", "emulated", "reference"),
    "recipe": ("auto", "delayed", "current", "rowwise", "mxfp8"),
    "precision.backward": ("fp8", "bf16", "bf16_wgrad"),
    "precision.keep_bf16": ([], ["head"], ["*"], ["first:2", "head", "last:2"], ["heads", "blocks.*"]),
    "precision.fast_accumulation": (False, True),
    "cuda_graphs": ("auto", True),
    "attention": ("auto", "te"),
}
MODELS = ("tiny", "gpt2", "gpt2_optimized", "llama3_small")
LEFT_OUT = {
    "attention": "auto",
    "precision.fast_accumulation": False,
    "precision.keep_bf16": [],
}
WORD = re.compile(r"(?<![\w.])((?:model|precision)\.\w+|precision|recipe|cuda_graphs|attention)=('?\[[^]]*\]'?|[\w.]+)")


@pytest.fixture(scope="module")
def bases():
    recipes = {name: preflight([f"recipe={name}"])[0].recipe for name in KEYS["recipe"]}
    return {name: preflight([f"model={name}"])[0] for name in MODELS}, recipes


def value(text):
    if text.startswith(("[", "'")):
        return [item for item in text.strip("'[]").split(",") if item]
    return {"null": None, "true": True, "false": False}.get(text, int(text) if text.isdecimal() else text)


def changed(config, key, new, recipes):
    if key == "precision":
        return replace(config, precision=PlainPrecisionConfig(name=new, backend=config.precision.backend))
    if key == "recipe":
        return replace(config, recipe=recipes[new])
    group, _, name = key.rpartition(".")
    return (
        replace(config, **{group: replace(getattr(config, group), **{name: new})})
        if group
        else replace(config, **{key: new})
    )


def ways(config, remedy, recipes):
    """The configurations after each way out: words that are typed, or that are left out."""
    for way in re.split(r", or |; ", re.sub(r" \(.*?\)|name head, .*: ", "", remedy)):
        after = config
        for key, text in WORD.findall(way):
            own_keys = vars(config.precision) | {"name": None, "backend": None}
            free = {
                "keep_bf16": [],
                "backward": "fp8",
                "fast_accumulation": False,
                "fallback": "allow",
            }
            assert key != "precision" or own_keys.items() >= free.items(), "a key of FP8's alone would be refused"
            after = changed(after, key, value(text), recipes)
        for key in re.findall(r"leave ([\w.]+) out$", way):
            after = changed(after, key, LEFT_OUT[key], recipes)
        assert after is not config, way
        yield after


def found_in(config):
    of_each = (model_checks.check, backend_check.check, attention_support.check, kept_check.check, checks._tokens)
    return [one for check in of_each for one in check(config)]


def is_known(one, found):
    """Whether a finding is about what others are about: an equal first key, or a model's key that is in both."""
    own = {key for key in one.keys if key.startswith("model.")}
    return any(one.keys[0] == other.keys[0] or own & set(other.keys) for other in found)


def drawn(bases, draw):
    """A configuration of which a part of the shape and a part of the other keys are odd. The heads may say it twice."""
    models, recipes = bases
    config = models[draw.choice(MODELS)]
    shapes = {f"model.{name}": values for name, values in SHAPES.items()}
    for choices, share in ((shapes, draw.choice((0.1, 0.6))), (KEYS, draw.choice((0.1, 0.9)))):
        for key, values in choices.items():
            if draw.random() < share:
                config = changed(config, key, draw.choice(values), recipes)
    if draw.random() < 0.3 and config.model.n_embd % config.model.n_head == 0:
        config = changed(config, "model.head_size", config.model.n_embd // config.model.n_head, recipes)
    return config


def test_every_way_out_of_odd_shapes_is_taken(bases):
    draw, numbers = random.Random(8), []
    for _ in range(600):
        config = drawn(bases, draw)
        found = found_in(config)
        numbers.append(len(found))
        together = config
        for one in found:
            together = next(ways(together, one.problem.remedy, bases[1]))
            for after in ways(config, one.problem.remedy, bases[1]):
                left = found_in(after)
                assert one.problem.cause not in [other.problem.cause for other in left], (config, one)
                assert all(is_known(other, found) for other in left), (config, one, left)
        assert found_in(together) == [], (config, found)
    assert max(numbers) >= 5
    assert min(numbers) == 0


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("model.n_embd=72", "model.n_embd=64, or precision=bf16"),
        ("model.n_embd=72 precision.fallback=allow", "model.n_embd=64"),  # its default, and typed
        ("model.n_positions=40 precision.keep_bf16=[]", "model.n_positions=32"),
        ("precision=bf16 precision.keep_bf16=[head]", "choose precision=fp8_hybrid, or leave precision.keep_bf16 out"),
        ("precision=bf16 precision.keep_bf16=[head] model.n_embd=72", "leave precision.keep_bf16 out"),
        ("precision=bf16 precision.backend=reference precision.keep_bf16=[head]", "leave precision.keep_bf16 out"),
    ],
)
def test_a_precision_that_the_other_words_rule_out_is_not_proposed(line, remedy):
    with pytest.raises(UserError) as told:
        preflight(shlex.split(line))
    assert [problem.remedy for problem in told.value.problems] == [remedy]


def test_what_is_wrong_beside_it_does_not_count():
    with pytest.raises(UserError) as told:
        preflight(["seed=-1", "model.n_embd=72", "optim.lr=x"])
    assert "model.n_embd=64, or precision=bf16" in [problem.remedy for problem in told.value.problems]


LINES = [
    "precision.backend=fused model=gpt2 model.n_kv_head=5",
    "precision.backend=fused model=gpt2_optimized model.n_embd=772",
    "precision.backend=fused model.n_embd=60 model.n_head=3 model.head_size=20",
    "model=llama3_small model.n_embd=1000",
    "model=gpt2 model.n_embd=1000 precision.keep_bf16=[head]",
    "model.n_embd=72 cuda_graphs=true",
    "model.n_positions=40 precision.fast_accumulation=true",
]


@pytest.mark.parametrize("line", LINES)
def test_the_first_ways_of_all_problems_are_composed(line):
    with pytest.raises(UserError) as told:
        preflight(shlex.split(line))
    words = []
    for problem in told.value.problems:
        way = problem.remedy.removeprefix("did you mean ").partition(", or ")[0]
        words += [f"{key}={text}".replace("'", "") for key, text in WORD.findall(way)]
        words += ["precision.keep_bf16=[]"] if way == "leave precision.keep_bf16 out" else []
    kept = shlex.split(line)
    typed = {word.partition("=")[0] for word in words}
    assert preflight([*(word for word in kept if word.partition("=")[0] not in typed), *dict.fromkeys(words)])

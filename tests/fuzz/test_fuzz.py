"""Random settings: refused in a known way, or composed. More of them with `-m slow`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_fp8 import compose
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.keys import key_paths
from gpt2_fp8.config.schema import RunConfig

KEYS = sorted(key_paths(RunConfig))
GROUPS = ["model", "recipe", "precision", "data", "trainer", "optim", "callbacks", "logger", "experiment", "debug"]
PLAIN = [
    "", "null", "true", "???", "0", "1", "-1", "2.5", "1e400", "nan", "1e-320", "99999999999999999999", "0x10", "1_000",
    "auto", "x", "tiny", "last", "[]", "{}", "[1,2]", "{a:1}", "[[[]]]", "../x", "~", ".", "\x1b[2J", "ü", "=", "a=b",
    "'", '"', "[", "{", "(", "\\", "$", "${", "${}", "${seed}", "${oc.env:SECRET}", "${now:%Y}", "${nope:1}", "${a.b}",
    "{_target_: os.mkdir, path: canary}", "range(0,3)", "choice(1,2)", "1,2", "glob(*)", "x" * 3000, "9" * 5000,
]  # fmt: skip
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
VALUES = st.one_of(st.sampled_from(PLAIN), st.integers().map(str), st.floats().map(repr), TEXT)
WORDS = st.one_of(
    st.tuples(st.sampled_from(["", "", "", "+", "++", "~"]), st.sampled_from(KEYS), VALUES).map(
        lambda word: f"{word[0]}{word[1]}={word[2]}"
    ),
    st.tuples(st.sampled_from(GROUPS), VALUES).map("=".join),
    TEXT,
)
FEW = settings(max_examples=25, deadline=None, derandomize=True, database=None)
MANY = settings(FEW, max_examples=3000, derandomize=False)


@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_settings_are_composed_or_refused(examples: settings) -> None:
    """With every reason."""

    @examples
    @given(st.lists(WORDS, max_size=3))
    def check(words: list[str]) -> None:
        try:
            configs = compose.preflight(["trainer=cpu", *words])
        except UserError as error:
            configs, causes = [], [problem.cause for problem in error.problems]
        else:
            causes = ["none"]
        assert all(isinstance(config, RunConfig) for config in configs)
        assert causes
        assert all(cause and cause.isprintable() for cause in causes)
        assert not Path("canary").exists()

    check()

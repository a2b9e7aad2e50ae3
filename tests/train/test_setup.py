"""What a run says of itself before it starts: the precision and the layers that will compute it."""

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.config import own_words
from gpt2_fp8.train.setup import resolve_micro_batch


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["model=tiny"], 16),
        (["model=gpt2", "data.tokenizer=bytes"], 1),
        (["model=gpt2", "data.tokenizer=bytes", "micro_batch_size=2"], 2),
        (["model=gpt2", "data.tokenizer=bytes", "micro_batch_size=auto"], 1),
    ],
)
def test_a_micro_batch_on_a_cpu_takes_seconds_unless_it_was_typed(words, size):
    (config,) = compose.preflight(["trainer=cpu", *words])
    assert resolve_micro_batch(config, 1, "cpu", own_words.keys(words)).micro_batch == size
    (gpu,) = compose.preflight(words)
    assert resolve_micro_batch(gpu, 1, "cuda", own_words.keys(words)).micro_batch >= size

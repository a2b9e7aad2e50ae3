"""Faults 47 to 49: processes that die, fail, or hang; workers that read data, and ranks."""

import numpy as np
import pytest

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.data.reader import Readers, UnitReader
from tests.data.corpora import files_config, items, module, write_jsonl
from tests.faults.unlucky import Once, be_killed, fail


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Files of one document each, and the items that a data module without workers makes of them."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(12):
        write_jsonl(folder / f"{i:02d}.jsonl", [f"<{i}>" + "abc" * 200])
    return folder / "*.jsonl", items(module(files_config(folder / "*.jsonl"), max_steps=20))


@pytest.fixture
def made(corpus, tmp_path, request):
    """A data module with a worker, in which the source does something to one unit; its units are not kept."""
    (tmp_path / "mark").mkdir()
    made = module(files_config(corpus[0], num_workers=1), max_steps=20)
    made.text.pool.close()
    made.text.pool._kept.clear()
    unit = made.text.corpus.train[made.text.streams[0].order.epoch(0)[4]].name
    action, times = request.param
    (reader,) = made.text.pool.readers.by_source.values()
    source = Once(reader.source, action, tmp_path / "mark", unit, times)
    made.text.pool.readers = Readers({"": UnitReader(source, reader.tokenizer, None)})
    yield made
    made.teardown()


def same(made, corpus):
    got = items(made)
    return len(got) == len(corpus[1]) and all(np.array_equal(a, b) for a, b in zip(got, corpus[1], strict=True))


@pytest.mark.parametrize("made", [(fail, 1)], indirect=True)
def test_47_an_error_in_a_worker_comes_out_with_its_place(made):
    with pytest.raises(AssertionError, match="no such luck") as caught:
        items(made)
    assert "in fail" in str(caught.value.__cause__)


@pytest.mark.parametrize("made", [(be_killed, 99)], indirect=True)
def test_47_a_unit_that_kills_every_worker_ends_the_run(made):
    with pytest.raises(RunError, match="4 worker processes ended while reading"):
        items(made)
    assert made.text.pool.counts.worker_deaths >= 3
    assert made.text.pool._workers is None  # ended with the error

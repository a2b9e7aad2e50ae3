"""Faults 47 to 49: processes that die, fail, or hang; workers that read data, and ranks."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.data import worker_pool
from gpt2_fp8.data.reader import UnitReader
from tests import forkserver
from tests.data.corpora import files_config, items, module, write_jsonl
from tests.faults.unlucky import (
    Once,
    be_killed,
    be_stopped,
    fail,
    leave,
    network_error,
    sleep,
    sluggish,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]


# ---- workers -----------------------------------------------------------------------------------------------------


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
    unit = made.text.corpus.train[made.text.strands[0].order.epoch(0)[4]].name
    action, times = request.param
    reader = made.text.pool.reader
    source = Once(reader.source, action, tmp_path / "mark", unit, times)
    made.text.pool.reader = UnitReader(source, reader.tokenizer, None)
    yield made
    made.teardown()


def same(made, corpus):
    got = items(made)
    return len(got) == len(corpus[1]) and all(np.array_equal(a, b) for a, b in zip(got, corpus[1], strict=True))


@pytest.mark.parametrize("made", [(be_killed, 1), (leave, 2)], indirect=True)
def test_47_a_worker_that_dies_is_replaced(made, corpus, caplog):
    assert same(made, corpus)
    assert made.text.pool.counts.worker_deaths in (1, 2)
    assert "another one takes its place" in caplog.text


@pytest.mark.parametrize("made", [(fail, 1)], indirect=True)
def test_47_an_error_in_a_worker_comes_out_with_its_place(made):
    with pytest.raises(AssertionError, match="no such luck") as caught:
        items(made)
    assert "in fail" in caught.value.__notes__[0]


@pytest.mark.parametrize("made", [(be_killed, 99)], indirect=True)
def test_47_a_unit_that_kills_every_worker_ends_the_run(made):
    with pytest.raises(RunError) as caught:
        items(made)
    cause, remedy = str(caught.value).splitlines()
    assert "4 worker processes ended while reading" in cause
    assert "was killed by SIGKILL, as happens when memory runs out" in cause
    assert "data.num_workers" in remedy
    assert made.text.pool.counts.worker_deaths == 4


@pytest.mark.parametrize("made", [(leave, 99)], indirect=True)
def test_47_an_exit_code_is_not_taken_for_lack_of_memory(made):
    with pytest.raises(RunError, match="the last one ended with exit code 3") as caught:
        items(made)
    assert "memory" not in str(caught.value)


def test_47_a_script_without_a_guard_is_told_what_it_lacks(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from gpt2_fp8.data.reader import UnitReader\n"
        "from gpt2_fp8.data.units import Unit\n"
        "from gpt2_fp8.data.prefetch import UnitPool\n"
        "pool = UnitPool(UnitReader(None, 'bytes', None), num_workers=1)\n"
        "pool.take(pool.ask(Unit('a unit', 'path', 0, 1)))\n"
    )
    done = forkserver.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert "reads the data ended with exit code 1 before it was ready" in done.stderr
    assert '__name__ == "__main__"' in done.stderr.rsplit("RunError", 1)[1]


@pytest.mark.parametrize("made", [(be_stopped, 1), (sleep, 1)], indirect=True)
def test_48_a_worker_without_life_is_replaced(made, corpus, monkeypatch, caplog):
    monkeypatch.setattr(worker_pool, "LIFE_SECONDS", 2.0)
    assert same(made, corpus)
    assert "showed no life for" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("made", [(sluggish, 1)], indirect=True)
def test_48_a_slow_worker_is_alive(made, corpus, monkeypatch):
    monkeypatch.setattr(worker_pool, "LIFE_SECONDS", 4.0)
    assert same(made, corpus)
    assert made.text.pool.counts.worker_deaths == 0


@pytest.mark.parametrize("made", [(fail, 0)], indirect=True)
def test_48_a_worker_that_waits_to_try_again_is_alive(made, corpus, monkeypatch, tmp_path):
    monkeypatch.setattr(worker_pool, "LIFE_SECONDS", 2.0)
    source = made.text.pool.reader.source
    source.action, source.times, source.waits = network_error, 1, (4.0,)
    assert same(made, corpus)
    assert made.text.pool.counts.worker_deaths == 0
    assert made.text.pool.counts.retries == 1

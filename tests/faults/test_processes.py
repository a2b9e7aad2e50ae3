"""Faults 47 to 49: processes that die, fail, or hang; workers that read data, and ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.data import worker_pool
from gpt2_fp8.data.reader import UnitReader
from gpt2_fp8.runtime.rank_end import RankEnd
from gpt2_fp8.runtime.stragglers import Place, Stragglers
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


# ---- ranks -------------------------------------------------------------------------------------------------------

CASES = ["raise-0", "raise-1", "data-1", "kill-0", "kill-1", "stop-0", "stop-1", "busy-1", "slow-0", "hang-0", "hang-1"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """{case: [(exit code or None, what it printed) of each rank]}, and where their farewells are."""
    folder = tmp_path_factory.mktemp("pairs")
    done = forkserver.run(
        [sys.executable, str(ROOT / "tests/faults/rank_cases.py"), str(folder), *CASES],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


@pytest.mark.parametrize("rank", [0, 1])
def test_49_a_rank_that_fails_ends_the_other_and_is_named(pairs, rank):
    """Here as with NCCL, which does not tell: the one that failed stays for a while."""
    ends = pairs[0][f"raise-{rank}"]
    assert [code for code, _ in ends] == [1, 1]
    assert "RuntimeError: the roof fell in" in ends[rank][1]
    words = f"rank {rank} failed: RuntimeError: the roof fell in"
    assert f"rank {1 - rank}: {words}" in ends[1 - rank][1]
    assert (pairs[1] / f"raise-{rank}.farewell-{1 - rank}").read_text() == words
    assert not (pairs[1] / f"raise-{rank}.farewell-{rank}").exists()


def test_49_an_end_of_a_known_kind_has_its_exit_code_on_every_rank(pairs):
    ends = pairs[0]["data-1"]
    assert [code for code, _ in ends] == [4, 4]
    assert "rank 1 failed: the hub is gone" in ends[0][1]


@pytest.mark.parametrize("rank", [0, 1])
def test_49_a_rank_that_is_killed_ends_the_other_and_is_named(pairs, rank):
    ends = pairs[0][f"kill-{rank}"]
    assert [ends[rank][0], ends[1 - rank][0]] == [-9, 1]
    assert f"rank {rank} is gone" in ends[1 - rank][1]


@pytest.mark.parametrize("rank", [0, 1])
def test_49_a_rank_without_life_ends_the_other_and_is_named(pairs, rank):
    ends = pairs[0][f"stop-{rank}"]
    assert [ends[rank][0], ends[1 - rank][0]] == [-9, 1], "SIGKILL is all that ends a frozen process"
    assert f"rank {1 - rank}: rank {rank} has shown no life for 6 s" in ends[1 - rank][1]


@pytest.mark.parametrize("case", ["busy-1", "slow-0"])
def test_49_a_rank_that_is_busy_or_done_is_left_in_peace(pairs, case):
    assert pairs[0][case] == [[0, ""], [0, ""]]


@pytest.mark.parametrize(("rank", "where"), [(0, "in step 21"), (1, "after step 20")])
def test_49_a_rank_whose_main_thread_hangs_is_named_once(pairs, rank, where):
    """Its own thread that watches knows it as well."""
    ends = pairs[0][f"hang-{rank}"]
    assert [code for code, _ in ends] == [1, 1]
    words = f"rank {rank} has been stuck {where} for 8 s, and the others wait for it"
    assert [words in output for _, output in ends] == [rank == 1, rank == 0], ends
    assert all((pairs[1] / f"hang-{rank}.farewell-{each}").read_text() == words for each in (0, 1))


def places(*entered):
    return [Place(each, 7, "in step 3") for each in entered]


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        ([places(20, 21)] * 5, [None, None, None, None, 0]),
        ([places(21, 20)] * 5, [None, None, None, None, 1]),
        ([places(21, 21)] * 9, [None] * 9),  # all of them wait for the device, or compute
        ([[Place(20, move, "saves"), Place(21, 7, "waits")] for move in range(9)], [None] * 9),  # it gets on
        ([*[places(20, 21)] * 3, places(21, 22), *[places(20, 21)] * 3], [None] * 7),  # it has entered the next one
        ([places(21, 20, 21, 20)] * 5, [None, None, None, None, 1]),
    ],
    ids=["first", "second", "level", "moves", "slow", "four"],
)
def test_49_who_is_behind(looks, found):
    watch = Stragglers(len(looks[0]), seconds=3.0)
    assert [watch.look(places, 1.0) for places in looks] == found


def test_49_a_child_that_was_killed_is_named():
    end = RankEnd(lambda error: None)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    end.children = [child]
    assert end.failed_child(killed=True) is None
    end.kill_children()
    child.wait()
    assert f"rank 1 (process {child.pid}) was killed by signal 9" in str(end.failed_child(killed=True))
    assert end.failed_child(killed=False) is None

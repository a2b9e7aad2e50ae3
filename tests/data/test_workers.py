"""Worker processes change nothing but the time, whatever becomes of them; and the cache changes nothing either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.reader import ABANDONED_SECONDS
from tests import forkserver
from tests.data.corpora import files_config, items, module


def workers_of(made: object) -> list[int]:
    return [*made.text.pool._workers._executor._processes]  # type: ignore[attr-defined]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def gone(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.whole
def test_workers_and_their_death_change_nothing(many_units: Path) -> None:
    whole = items(module(files_config(many_units), max_steps=40))
    made = module(files_config(many_units, num_workers=2), max_steps=40)
    made.text.pool._kept.clear()
    got = []
    for item in made.train_dataloader():
        got.append(item["ids"].numpy())
        made.advance(item["cursor"])
        if len(got) in (3, 20):
            made.text.pool._kept.clear()  # or a corpus this small would not be read again
            os.kill(workers_of(made)[0], signal.SIGKILL)
        if len(got) == 30:
            for pid in workers_of(made):
                os.kill(pid, signal.SIGINT)  # a terminal's Ctrl-C reaches them too, and is the parent's to handle
    pids = workers_of(made)
    assert all(map(alive, pids))
    made.teardown()
    assert gone(pids)
    assert len(got) == 40
    assert all(np.array_equal(a, b) for a, b in zip(got, whole, strict=True))
    assert made.report()["reading"]["worker_deaths"] >= 1


@pytest.mark.whole
def test_no_orphans_when_the_parent_is_killed_and_no_torch_in_a_worker(many_units: Path) -> None:
    code = (
        "import sys, time\n"
        "if __name__ == '__main__':\n"
        "    from tests.data.corpora import files_config, module, items\n"
        f"    made = module(files_config({str(many_units)!r}, num_workers=2))\n"
        "    made.text.pool._kept.clear(); items(made, 3)\n"
        "    print(*made.text.pool._workers._executor._processes, flush=True); time.sleep(60)\n"
    )
    process = forkserver.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(number) for number in process.stdout.readline().split()]
    assert len(pids) >= 1
    assert all(map(alive, pids))
    assert all("libtorch" not in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(pids)


def test_cache_gives_the_same_tokens_and_mends_itself(many_units: Path, tmp_path: Path) -> None:
    whole = items(module(files_config(many_units)))
    config = files_config(many_units, cache_dir=str(tmp_path / "cache"))
    assert all(np.array_equal(a, b) for a, b in zip(items(module(config)), whole, strict=True))
    stored = sorted((tmp_path / "cache").glob("*.u16"))
    assert len(stored) > 10
    again = module(config)
    assert all(np.array_equal(a, b) for a, b in zip(items(again), whole, strict=True))
    assert again.report()["reading"]["cache_hits"] == again.report()["reading"]["units"]
    before = [path.read_bytes() for path in stored]
    stored[0].write_bytes(before[0][:-3])  # cut short
    stored[1].write_bytes(bytes([before[1][0] ^ 1]) + before[1][1:])  # one bit
    stored[2].with_suffix(".json").write_text("{")
    about = stored[3].with_suffix(".json")
    about.write_text(about.read_text().replace('"tokens": ', '"tokens": 9999999999999'))
    mended = module(config)
    assert all(np.array_equal(a, b) for a, b in zip(items(mended), whole, strict=True))
    reading = mended.report()["reading"]
    assert reading["units"] - reading["cache_hits"] == 4
    assert [path.read_bytes() for path in stored] == before
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_what_a_killed_writer_has_left_is_removed_by_a_later_run(many_units: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    left, new = cache / "left.tmp", cache / "new.tmp"
    for path in (left, new):
        path.write_bytes(b"half a unit")
    long_ago = time.time() - ABANDONED_SECONDS - 60
    os.utime(left, (long_ago, long_ago))
    items(module(files_config(many_units, cache_dir=str(cache))), 3)
    assert not left.exists()
    assert new.exists(), "another process may be writing it"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        module(files_config(many_units, cache_dir=str(tmp_path / "file" / "x")))

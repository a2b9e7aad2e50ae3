"""Faults 50 to 54: a hub that fails in every way, through the real client, by a hub on the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2_fp8.data import hub_client, retry
from tests import forkserver
from tests.data.hub import Hub
from tests.data.hub_runs import PAJAMA, ROOT, TEXTS, WEB, Client, expected, web_units
from tests.runs import SMALL, assert_same_checkpoint, checkpoint, metrics, summary

STEPS = 60


@pytest.fixture(autouse=True)
def _whole(hub: Hub) -> None:
    hub.rate, hub.refuse, hub.faults[:] = 0.0, None, []


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_50_a_third_of_all_requests_fails_and_the_tokens_are_the_same(hub: Hub, client: Client) -> None:
    hub.rate = 0.3
    hub.happened.clear()
    for data, units in ((WEB, web_units(3)), (PAJAMA, TEXTS)):
        answer = client.ask(data, steps=STEPS)
        assert answer.get("sha") == expected(units, STEPS), answer
    assert len(hub.happened) >= 10, "or else this shows nothing"
    assert len(set(hub.happened)) >= 4


@pytest.mark.parametrize("kind", ["503", "429", "short", "stall"])
def test_50_each_kind_of_fault_loses_and_repeats_nothing(client: Client, kind: str) -> None:
    answer = client.ask(WEB, ["", kind, "", kind], steps=STEPS)
    assert answer.get("sha") == expected(web_units(3), STEPS), answer
    assert client.left == 0, "every fault happened"


LONGEST = max(retry.HUB_WAITS)


@pytest.mark.parametrize(
    ("fault", "asked"),
    [("429 retry-after: 86400", 86400), ("503 retry-after: 86400", 86400), ('429 ratelimit: "api";r=0;t=86400', 86400)],
)
def test_a_server_that_asks_for_a_day_gets_minutes(client: Client, fault: str, asked: int) -> None:
    answer = client.ask(WEB, ["", fault, ""], steps=STEPS)
    assert answer.get("sha") == expected(web_units(3), STEPS), answer
    assert client.left == 0
    assert max(answer["waits"]) == LONGEST == 120
    (line,) = (line for line in answer["log"] if "asks for a wait" in line)
    assert f"asks for a wait of {asked} s (HTTP {fault[:3]}); trying again in 120 s" in line


def test_a_short_wait_is_granted_whole(client: Client) -> None:
    answer = client.ask(WEB, ["503 retry-after: 37"], steps=STEPS)
    assert 37 in answer["waits"]
    assert max(answer["waits"]) == 37


@pytest.mark.parametrize("told", ["Wed, 21 Oct 2025 07:28:00 GMT", "soon", "-1", "\u00b2", ""])
def test_what_is_no_number_of_seconds_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setattr(retry, "sleep", lambda seconds: pytest.fail("it waits"))
    hub_client.wait_as_asked(SimpleNamespace(status_code=503, headers={"retry-after": told}))


def test_a_wait_that_a_server_asked_for_is_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a worker that waits for longer than a minute would be taken for stuck."""
    alive = []
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: alive.append((seconds, retry.is_waiting())))
    hub_client.wait_as_asked(SimpleNamespace(status_code=429, headers={"retry-after": "100"}))
    assert alive == [(100.0, True)]
    assert not retry.is_waiting()


MAINS = """
import json, sys, time
from gpt2_fp8 import run
from gpt2_fp8.data import retry

retry.HUB_WAITS = (0.0, 0.0)
slept = time.sleep
time.sleep = lambda seconds: slept(min(seconds, 0.01))
for line in sys.stdin:
    print("\\n@", run.main(json.loads(line)), flush=True)
"""
RUN = [*SMALL, "data=fineweb", "data.repo=Org/web", "data.revision=main", "data.train_files=[sample/10BT/*.parquet]",
       "data.val_files=[sample/10BT/003_00000.parquet]", "data.tokenizer=bytes", "data.num_workers=0",
       "data.val_sequences=8", "callbacks.checkpoint_every_n_steps=0", "trainer.log_every_n_steps=5",
       "logger=csv"]  # fmt: skip


class Program:
    """`run.main` in a process of its own, one command line after the other."""

    def __init__(self, hub: Hub, folder: Path):
        (folder / "script.py").write_text(MAINS)
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "0",
                       "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}  # fmt: skip
        self.errors = folder / "stderr"
        self.process = forkserver.Popen(
            [sys.executable, "script.py"], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors.open("w"),
        )  # fmt: skip

    def __call__(self, *words: str) -> tuple[int, str]:
        """The exit code, and what came on stderr."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        before = len(self.errors.read_text())
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("@ "):
                return int(line[2:]), self.errors.read_text()[before:]
        raise AssertionError(self.errors.read_text())


def test_51_a_hub_that_stays_dead_ends_in_a_checkpoint_and_4(hub: Hub, tmp_path: Path) -> None:
    program = Program(hub, tmp_path)
    try:
        assert program(*RUN, "run_name=first")[0] == 0  # afterwards the process knows the files' footers
        hub.requests.clear()
        assert program(*RUN, "run_name=clean")[0] == 0
        asked = sum("GET" in request and request.endswith(".parquet") for request in hub.requests)
        hub.faults[:] = [""] * (asked - 4) + ["500"] * 100_000
        code, stderr = program(*RUN, "run_name=lost")
        lost = summary(tmp_path / "outputs/lost")
        assert code == 4, stderr
        assert (lost["status"], lost["exit_code"]) == ("data_lost", 4)
        assert 0 < lost["steps"] < 12
        assert lost["checkpoint"]["last"].endswith(f"step-{lost['steps']:08d}")
        assert "cannot read " in stderr
        assert "after 3 attempts" in stderr
        assert "when it answers again: run_name=lost ckpt_path=last continues" in stderr
        assert "Traceback" not in stderr
        hub.faults.clear()
        code, stderr = program(*RUN, "run_name=lost", "ckpt_path=last")
        assert code == 0, stderr
        clean, continued = (tmp_path / "outputs" / name for name in ("clean", "lost"))
        assert_same_checkpoint(checkpoint(continued, 12), checkpoint(clean, 12))
        assert metrics(continued)["val_loss"] == metrics(clean)["val_loss"]
    finally:
        program.process.kill()
        program.process.communicate()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_52_a_refusal_is_told_at_once(hub: Hub, client: Client, status: int) -> None:
    hub.refuse = status
    before = len(hub.requests)
    answer = client.ask(WEB)
    assert answer["error"] == "UserError"
    assert "the hub refuses Org/web at main" in answer["message"]
    assert "HF_TOKEN" in answer["message"] or "check data.repo" in answer["message"]
    assert len(answer["message"].splitlines()) == 2
    assert len(hub.requests) == before + 1, "a second attempt would not be let in either"


def test_52_a_refusal_in_the_midst_of_training_is_told_at_once(hub: Hub, client: Client) -> None:
    answer = client.ask(WEB, ["", "", "403"], steps=STEPS)
    assert answer["error"] == "UserError"
    assert "HF_TOKEN" in answer["message"]
    assert client.left == 0


def test_52_a_revision_that_is_not_there(hub: Hub, client: Client) -> None:
    before = len(hub.requests)
    answer = client.ask({**WEB, "revision": "v9"})
    assert "set data.revision" in answer["message"]
    assert len(hub.requests) == before + 1


@pytest.mark.parametrize(("data", "kind"), [(WEB, "truncated"), (PAJAMA, "truncated"), (PAJAMA, "short")])
def test_53_half_a_shard_is_fetched_again_and_never_trained_on(client: Client, data: dict[str, Any], kind: str) -> None:
    answer = client.ask(data, [kind] * 3, steps=STEPS)
    assert answer.get("sha") == expected(web_units(3) if data is WEB else TEXTS, STEPS), answer
    assert client.left == 0


def test_53_a_message_of_the_hub_is_nothing_that_a_terminal_obeys(hub: Hub, client: Client) -> None:
    hub.repos["Org/evil"] = {"README.md": b"# card\n", "a\x1b[2J.parquet": b"PAR1 no parquet"}
    answer = client.ask({"repo": "Org/evil", "train_files": ["*.parquet"]})
    assert "\x1b" not in answer["message"]


def test_54_offline_with_a_warm_cache_runs(hub: Hub, client: Client, cache: Path, tmp_path: Path) -> None:
    data = {**WEB, "val_sequences": 12, "cache_dir": str(cache)}
    online = client.ask(data, steps=STEPS)
    offline = Client(hub, tmp_path, HF_HUB_OFFLINE="1")
    before = len(hub.requests)
    warm = offline.ask(data, steps=STEPS)
    cold = offline.ask({**data, "text_column": "id"})
    missing = offline.ask({**data, "tokenizer": "bytes", "cache_dir": _half(cache, tmp_path / "half")}, steps=STEPS)
    offline.close()
    assert len(hub.requests) == before
    assert warm.get("sha") == online["sha"] == expected(web_units(3), STEPS), warm
    assert warm["report"]["reading"]["cache_hits"] == warm["report"]["reading"]["units"]
    assert warm["report"]["source"] == online["report"]["source"]
    for answer in (cold, missing):
        assert answer["error"] == "UserError", answer
        assert "unset HF_HUB_OFFLINE" in answer["message"]


def _half(cache: Path, folder: Path) -> str:
    """A copy of a cache, without half of its units."""
    folder.mkdir()
    for number, path in enumerate(sorted(cache.glob("*.json"))):
        for part in (path, path.with_suffix(".u16")):
            if part.exists() and (number % 2 or path.name.startswith("hub-")):
                (folder / part.name).write_bytes(part.read_bytes())
    return str(folder)


def test_54_a_dead_hub_and_a_warm_cache(hub: Hub, client: Client, cache: Path) -> None:
    data = {**WEB, "val_sequences": 12, "cache_dir": str(cache)}
    client.ask(data, steps=STEPS)
    hub.refuse = 503
    answer = client.ask(data, steps=STEPS)
    assert answer.get("sha") == expected(web_units(3), STEPS), answer
    assert client.ask({**data, "text_column": "id"})["error"] == "DataSourceLost"


@pytest.mark.parametrize("content", ["{", "[]", '{"commit": "x"}', '{"commit": "../x", "files": {}, "shards": {}}'])
def test_54_a_listing_that_is_none_is_not_used(hub: Hub, client: Client, tmp_path: Path, content: str) -> None:
    client.ask({**WEB, "cache_dir": str(tmp_path)}, steps=1)
    (path,) = tmp_path.glob("hub-*.json")
    path.write_text(content)
    hub.refuse = 503
    assert client.ask({**WEB, "cache_dir": str(tmp_path)}, steps=1)["error"] == "DataSourceLost"

"""Faults 50 to 54: a hub that fails in every way, through the real client, by a hub on the loopback."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.hub import Hub
from tests.data.hub_runs import PAJAMA, TEXTS, WEB, Client, expected, web_units
from tests.runs import SMALL, assert_same_checkpoint, checkpoint, forked, metrics, summary

STEPS = 60


@pytest.fixture(autouse=True)
def _whole(hub: Hub) -> Iterator[None]:
    yield
    hub.refuse, hub.faults[:] = None, []


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("data", "faults"),
    [
        (WEB, ["", "503", "", "429", "short", "stall", "truncated", "reset"]),
        (WEB, ["500"] * 9),  # more than the client's own tries
        (PAJAMA, ["500", "reset", "truncated", "short"]),
    ],
)
def test_50_no_kind_of_fault_loses_or_repeats_anything(client: Client, data: dict[str, Any], faults: list[str]) -> None:
    answer = client.ask(data, faults, steps=STEPS)
    assert answer.get("sha") == expected(web_units(3) if data is WEB else TEXTS, STEPS), answer
    assert client.left == 0, "every fault happened"
    assert answer["report"]["reading"]["retries"] >= (len(faults) != 4)


RUN = [*SMALL, "data=fineweb", "data.repo=Org/web", "data.revision=main", "data.train_files=[sample/10BT/*.parquet]",
       "data.val_files=[sample/10BT/003_00000.parquet]", "data.tokenizer=bytes", "data.num_workers=0",
       "data.val_sequences=8", "callbacks.checkpoint_every_n_steps=0", "trainer.log_every_n_steps=5",
       "logger=csv", "plugins=[quick]"]  # fmt: skip


def test_51_a_hub_that_stays_dead_ends_in_a_checkpoint_and_4(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text("import time\n\nslept = time.sleep\n"
                                       "time.sleep = lambda seconds: slept(min(seconds, 0.01))\n")  # fmt: skip

    def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return forked(*RUN, f"run_name={name}", *words, cwd=tmp_path, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0",
                      HF_HOME=str(tmp_path / "hf"))  # fmt: skip

    hub.requests.clear()
    assert run("clean").returncode == 0
    asked = sum("GET" in request and request.endswith(".parquet") for request in hub.requests)
    hub.faults[:] = [""] * (asked - 4) + ["500"] * 100_000
    done = run("lost")
    lost = summary(tmp_path / "outputs/lost")
    assert done.returncode == 4, done.stderr
    assert (lost["status"], lost["exit_code"]) == ("data_lost", 4)
    assert 0 < lost["steps"] < 12
    assert lost["checkpoint"]["last"].endswith(f"step-{lost['steps']:08d}")
    assert "run_name=lost ckpt_path=last continues" in done.stderr
    assert "Traceback" not in done.stderr
    hub.faults.clear()
    done = run("lost", "ckpt_path=last")
    assert done.returncode == 0, done.stderr
    clean, continued = (tmp_path / "outputs" / name for name in ("clean", "lost"))
    assert_same_checkpoint(checkpoint(continued, 12), checkpoint(clean, 12))
    assert metrics(continued)["val_loss"] == metrics(clean)["val_loss"]


def test_52_a_refusal_is_told_at_once(hub: Hub, client: Client) -> None:
    hub.refuse = 401
    before = len(hub.requests)
    answer = client.ask(WEB)
    assert answer["error"] == "UserError"
    assert "data.repo" in answer["message"]
    assert len(hub.requests) == before + 1, "a second attempt would not be let in either"
    hub.refuse = None
    answer = client.ask(WEB, ["", "", "403"], steps=STEPS)  # in the midst of training
    assert answer["error"] == "UserError"
    assert client.left == 0


def test_54_a_dead_hub_and_a_warm_cache(hub: Hub, client: Client, cache: Path) -> None:
    data = {**WEB, "val_sequences": 12, "cache_dir": str(cache)}
    client.ask(data, steps=STEPS)
    hub.refuse = 503
    answer = client.ask(data, steps=STEPS)
    assert answer.get("sha") == expected(web_units(3), STEPS), answer
    assert client.ask({**data, "text_column": "id"})["error"] == "DataSourceLost"
    (listing,) = cache.glob("hub-*.json")
    listing.write_text("{")
    assert client.ask(data, steps=1)["error"] == "DataSourceLost"

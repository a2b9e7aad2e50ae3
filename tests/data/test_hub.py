"""The hub road, through the hub's real client, against a hub on the loopback that can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.hub import Hub
from tests.data.hub_runs import PAJAMA, TEXTS, WEB, Client, expected, web_units

pytestmark = pytest.mark.whole


def test_parquet_by_row_groups_with_a_file_held_out(hub: Hub, client: Client) -> None:
    answer = client.ask({**WEB, "val_sequences": 12})
    assert answer["sha"] == expected(web_units(3))
    assert answer["report"]["units"] == 27
    assert answer["report"]["source"]["commit"] == hub.commit("Org/web")
    assert answer["val"] == 12
    assert answer["report"]["reading"]["retries"] == 0


def test_compressed_lines_through_workers(client: Client) -> None:
    answer = client.ask({**PAJAMA, "num_workers": 1})
    assert answer["sha"] == expected(TEXTS)
    assert answer["workers"] == 1
    assert not answer["torch_in_worker"]  # hundreds of MB and seconds of each worker's start


@pytest.mark.parametrize(
    "faults",
    [["500", "500", "429"], ["reset", "reset"], ["truncated"], ["500"] * 9],
    ids=["5xx", "reset", "truncated", "longer than the client's own tries"],
)
def test_faults_lose_and_repeat_nothing(client: Client, faults: list[str]) -> None:
    answer = client.ask(WEB, faults, steps=60)
    assert answer.get("sha") == expected(web_units(3), 60), answer
    assert client.left == 0, "every fault happened"
    if len(faults) > 5 or faults == ["truncated"]:
        assert answer["report"]["reading"]["retries"] >= 1


def test_faults_in_compressed_lines(client: Client) -> None:
    answer = client.ask(PAJAMA, ["500", "reset", "truncated"], steps=60)
    assert answer.get("sha") == expected(TEXTS, 60), answer
    assert client.left == 0, "every fault happened"


def test_a_hub_that_stays_dead_is_said_so(hub: Hub, client: Client, tmp_path: Path) -> None:
    answer = client.ask(WEB, ["500"] * 10_000, steps=200)
    assert answer["error"] == "DataSourceLost"
    assert "after 7 attempts" in answer["message"]
    assert "without a network: data=stdlib" in answer["message"]
    unnamed = Client(hub, tmp_path, "http://no-such-host.invalid")
    answer = unnamed.ask(WEB)
    unnamed.close()
    assert "after 2 attempts" in answer["message"]
    assert "the server's name does not resolve" in answer["message"]
    nowhere = Client(hub, tmp_path, "http://127.0.0.1:9")
    answer = nowhere.ask(WEB)
    nowhere.close()
    assert answer["error"] == "DataSourceLost"


@pytest.mark.parametrize(
    ("changes", "cause", "remedy"),
    [
        ({"repo": "Org/none"}, "the hub refuses Org/none at main", "check data.repo"),
        ({"revision": "v9"}, "the hub refuses Org/web at v9", "set data.revision"),
        ({"train_files": ["*.parquet"]}, "Org/web has no file *.parquet", "correct data.train_files"),
        ({"text_column": "content"}, "has no text column 'content'", "set data.text_column"),
    ],
)
def test_what_the_user_can_mend_is_said_at_once(
    client: Client, changes: dict[str, Any], cause: str, remedy: str
) -> None:
    answer = client.ask({**WEB, **changes})
    assert answer["error"] == "UserError"
    assert cause in answer["message"]
    assert remedy in answer["message"]

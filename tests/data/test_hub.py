"""The hub road, through the hub's real client, against a hub on the loopback that can fail."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("changes", "said"), [({"revision": "v9"}, "data.revision"), ({"train_files": ["*.parquet"]}, "data.train_files")]
)
def test_what_the_user_can_mend_is_said_at_once(hub: Hub, client: Client, changes: dict[str, Any], said: str) -> None:
    before = len(hub.requests)
    answer = client.ask({**WEB, **changes})
    assert answer["error"] == "UserError"
    assert said in answer["message"]
    assert not answer["waits"]
    if "revision" in changes:
        assert len(hub.requests) == before + 1, "a second attempt would find it no more"

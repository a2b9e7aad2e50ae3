"""A data set of the hub by its name alone: its own splits, and the cache of the hub's client in place of a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.hub import Hub
from tests.data.hub_runs import TEXTS, Client, parquet

pytestmark = pytest.mark.whole

CONFIGS = b"---\nconfigs:\n- config_name: one\n  data_files: a/*\n- config_name: two\n  data_files: b/*\n---\n"
TABLE = ("id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(TEXTS[1] * 3))).encode()
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[0] * 9).encode()
REPOS = {
    "By/name": {
        "README.md": b"# card\n",
        "data/validation-0.parquet": parquet(TEXTS[2]), "data/test-0.parquet": parquet(TEXTS[3]),
        "data/train-0.parquet": parquet(TEXTS[0]), "data/train-1.parquet": parquet(TEXTS[1]),
    },
    "By/table": {"README.md": b"# card\n", "train.csv": TABLE, "test.csv": TABLE},
    "By/shards": {"README.md": b"# card\n"} | {f"{i}.parquet": parquet(TEXTS[i]) for i in range(3)},
    "By/single": {"README.md": b"# card\n", "a.jsonl": LINES},
    "By/configs": {"README.md": CONFIGS, "a/x.parquet": parquet(TEXTS[0]), "b/x.parquet": parquet(TEXTS[1])},
    "By/script": {"README.md": b"# card\n", "script.py": b"import datasets\n"},
}  # fmt: skip
NAMED = {
    "By/name": (["data/train-*"], ["data/validation-*"]),
    "By/table": (["train.csv"], ["test.csv"]),
    "By/shards": (["*.parquet"], ["2.parquet"]),
}


@pytest.fixture(autouse=True)
def _served(hub: Hub) -> None:
    hub.refuse, hub.faults[:] = None, []
    hub.repos |= REPOS


def snapshot(hub: Hub, home: Path, repo: str) -> None:
    """What the hub's client keeps of a data set that it has downloaded."""
    folder = home / f"hub/datasets--{repo.replace('/', '--')}"
    for name, content in REPOS[repo].items():
        path = folder / "snapshots" / hub.commit(repo) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(hub.commit(repo))


def test_a_name_alone_is_the_data_sets_own_splits(hub: Hub, client: Client) -> None:
    for repo, (train, val) in NAMED.items():
        by_name = client.ask({"repo": repo, "train_files": [], "val_sequences": 8})
        named = client.ask({"repo": repo, "train_files": train, "val_files": val, "val_sequences": 8})
        assert by_name.get("sha") == named["sha"], by_name
        assert (by_name["report"]["units"], by_name["val"]) == (named["report"]["units"], 8)
    single = client.ask({"repo": "By/single", "train_files": [], "val_sequences": 8}, steps=60)
    assert single["val"] == 8, "of a single file documents are held out"
    assert single["report"]["documents"]["read"] < 9 * len(TEXTS[0])


@pytest.mark.parametrize(
    ("repo", "said"),
    [("By/configs", "['one', 'two']"), ("By/script", "refs/convert/parquet"), ("By/nobody", "check data.repo")],
)
def test_what_a_name_does_not_tell_is_refused_at_once(client: Client, repo: str, said: str) -> None:
    answer = client.ask({"repo": repo, "train_files": []})
    assert answer["error"] == "UserError", answer
    assert said in answer["message"]
    assert answer["message"].count("\n") == 1
    assert not answer["waits"]


def test_a_text_of_the_hub_is_validated_by_itself(hub: Hub, client: Client) -> None:
    data = {"repo": "By/name", "train_files": [], "val_sequences": 8}
    part = {"repo": "By/shards", "files": ["1.*"], "sequences": 4}
    hub.requests.clear()
    answer = client.ask(data | {"validation": {"other": {"repo": "By/table", "sequences": 4}, "part": part}})
    assert (answer.get("sets"), answer.get("val")) == (["other", "part"], 16), answer
    assert not any("By/shards" in request and "0.parquet" in request for request in hub.requests)
    answer = client.ask(data | {"validation": {"part": part | {"files": ["no*"]}}})
    assert answer.get("error") == "UserError", answer
    assert "data.validation.part: By/shards has no file no*" in answer["message"]
    assert "data.validation.part.files" in answer["message"]


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", pytest.param("HF_DATASETS_OFFLINE", marks=pytest.mark.slow)])
def test_without_a_network_the_clients_cache_is_the_same_text(
    hub: Hub, client: Client, tmp_path: Path, variable: str
) -> None:
    online = {repo: client.ask({"repo": repo, "train_files": [], "val_sequences": 8}) for repo in NAMED}
    for repo in NAMED:
        snapshot(hub, tmp_path, repo)
    alone = Client(hub, tmp_path, **{variable: "1"})
    try:
        hub.requests.clear()
        for repo, there in online.items():
            here = alone.ask({"repo": repo, "train_files": [], "val_sequences": 8})
            assert here.get("sha") == there["sha"], here
            assert (here["val"], here["report"]["source"]) == (8, there["report"]["source"])
        refused = alone.ask({"repo": "By/single", "train_files": []})
        assert refused["error"] == "UserError"
        assert "data.repo=By/single" in refused["message"]
        assert hub.requests == []
    finally:
        alone.close()

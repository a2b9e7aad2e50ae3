"""What is text in a file: a value by its own type, and a column by what the file says, here and on a hub alike."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt2_fp8.config.errors import UserError
from tests.data.corpora import files_config, items, module
from tests.data.hub import Hub
from tests.data.hub_runs import PAJAMA, WEB, Client, expected, web_units
from tests.data.hub_runs import TEXTS as HUB_TEXTS

pytestmark = pytest.mark.whole

GOOD = [json.dumps({"text": f"row {i}\n" + "wörd " * (i % 9), "meta": i}) for i in range(60)]
ODD_TEXTS = ['{"text": 5}', '{"text": ["a", "b"]}', '{"text": {"a": "b"}}', '{"text": null}', '{"other": "x"}']
ODD_LINES = [
    '{"text": ', "[1]", '{"text": "\\ud800 lone"}', '{"text": "x", "meta": {"b": []}}', '{"text": "", "meta": "s"}',
]  # fmt: skip


def file(*lines: str) -> bytes:
    return "\n".join(lines).encode()


def table(**columns: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, row_group_size=20)
    return out.getvalue()


TEXTS = [json.loads(line)["text"] for line in GOOD]
ROWS = table(text=TEXTS)


def both(hub: Hub, client: Client, folder: Path, files: dict[str, bytes]) -> tuple[Any, Any]:
    """What comes of the same files by way of the hub, and from this machine."""
    repo = f"Org/{hashlib.sha1(str(folder).encode()).hexdigest()}"
    hub.repos[repo] = files
    for name, content in files.items():
        (folder / name).write_bytes(content)
    there = client.ask({"repo": repo, "train_files": [*files]}, steps=60)
    try:
        made = module(files_config([folder / name for name in files]), max_steps=60)
        ids = items(made, 60)
        digest = hashlib.sha256(b"".join(batch.tobytes() for batch in ids)).hexdigest()
        return there, {"sha": digest, "documents": made.report()["documents"]}
    except UserError as error:
        return there, {"error": type(error).__name__, "message": str(error)}


@pytest.mark.parametrize(
    "files",
    [
        {"a.jsonl": file(*ODD_TEXTS, *GOOD, *ODD_LINES, "", '{"text": "cut in the midd')},
        {"a.parquet": table(text=pa.nulls(20)), "b.parquet": ROWS},
        {"a.parquet": ROWS, "b.parquet": table(text=[*TEXTS[:9], None, ""], n=[[1]] * 11)},
        {"a.parquet": table(text=pa.array(TEXTS).dictionary_encode(), n=[*range(60)]), "b.parquet": ROWS},
    ],
)  # fmt: skip
def test_what_is_no_text_is_skipped_and_counted_alike(
    hub: Hub, client: Client, tmp_path: Path, files: dict[str, bytes]
) -> None:
    there, here = both(hub, client, tmp_path, files)
    assert there.get("sha") == here["sha"], there
    assert (there["report"]["documents"], there["report"]["reading"]["retries"]) == (here["documents"], 0)


WRONG = {
    "numbers": (table(text=[*range(60)]), file(*['{"text": 5}'] * 60)),
    "another name": (table(content=TEXTS), file(*[line.replace('"text"', '"content"') for line in GOOD])),
}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_column_that_is_missing_or_no_text_names_its_file_and_is_not_tried_again(
    hub: Hub, client: Client, tmp_path: Path, kind: str, wrong: str
) -> None:
    later = wrong == "numbers"
    contents = [WRONG[wrong][kind == "jsonl"], ROWS if kind == "parquet" else file(*GOOD)]
    names = [f"a.{kind}", f"b.{kind}"]
    files = dict(zip(names, contents[::-1] if later else contents, strict=True))
    for answer in both(hub, client, tmp_path, files):
        assert answer.get("error") == "UserError", answer
        assert names[later] in answer["message"]
        assert "data.text_column" in answer["message"]
        assert not answer.get("waits")


def arrow(texts: list[str]) -> bytes:
    out, rows = io.BytesIO(), pa.table({"text": texts})
    with pa.ipc.new_stream(out, rows.schema) as stream:
        stream.write_table(rows)
    return out.getvalue()


OTHERS = {
    "jsonl.gz": gzip.compress(file(*GOOD)), "json.bz2": bz2.compress(file(*GOOD)), "ndjson": file(*GOOD),
    "json": json.dumps([json.loads(line) for line in GOOD], indent=1).encode(), "txt": file(*TEXTS),
    "arrow": arrow(TEXTS), "csv": ("id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(TEXTS))).encode(),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_of_the_hub(hub: Hub, client: Client, tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(file(*GOOD))
    if kind == "txt":  # a document a line
        lines = [json.dumps({"text": line}) for text in TEXTS for line in text.split("\n")]
        (tmp_path / "a.jsonl").write_bytes(file(*lines))
    hub.repos[f"Org/{kind}"] = {f"a.{kind}": OTHERS[kind]}
    there = client.ask({"repo": f"Org/{kind}", "train_files": ["*"]}, steps=12)
    ids = items(module(files_config(tmp_path / "a.jsonl")), 12)
    assert there.get("sha") == hashlib.sha256(b"".join(batch.tobytes() for batch in ids)).hexdigest(), there


def test_a_tables_cells_are_text_and_an_unknown_kind_is_refused(hub: Hub, client: Client, tmp_path: Path) -> None:
    cells = ["5", "NA", "1e5", "true", "2024-01-15", "null"] * 40
    (tmp_path / "a.jsonl").write_bytes(file(*(json.dumps({"text": cell}) for cell in cells)))
    hub.repos["Org/cells"] = {"a.csv": file("text", *cells), "a.odd": b"x" * 99}
    there = client.ask({"repo": "Org/cells", "train_files": ["*.csv"]}, steps=6)
    ids = items(module(files_config(tmp_path / "a.jsonl")), 6)
    assert there.get("sha") == hashlib.sha256(b"".join(batch.tobytes() for batch in ids)).hexdigest(), there
    assert client.ask({"repo": "Org/cells", "train_files": ["*.odd"]})["error"] == "UserError"


def test_a_row_group_takes_one_request_and_its_own_bytes(hub: Hub, client: Client) -> None:
    noise = [os.urandom(2000).hex() for _ in range(1000)]
    out = io.BytesIO()
    pq.write_table(pa.table({"text": noise, "other": noise[::-1]}), out, row_group_size=100, write_statistics=False)
    hub.repos["Org/large"] = {f"{i}.parquet": out.getvalue() for i in range(2)}
    hub.requests.clear()
    hub.sent = 0
    answer = client.ask({"repo": "Org/large", "train_files": ["*"], "num_workers": 1}, steps=12)
    assert "sha" in answer, answer
    asked = [request for request in hub.requests if "/resolve/" in request]
    units = answer["report"]["reading"]["units"]
    assert len(asked) <= 2 + units + 3  # footers, also in a worker, which reads a unit ahead
    assert len(hub.requests) - len(asked) <= 5
    assert hub.sent < (units + 1.5) * len(out.getvalue()) / 20 + 1_000_000


# ---- the way to the hub ----------------------------------------------------------------------------------------------


def test_parquet_by_row_groups_with_a_file_held_out(hub: Hub, client: Client) -> None:
    answer = client.ask({**WEB, "val_sequences": 12})
    assert (answer["sha"], answer["report"]["units"]) == (expected(web_units(3)), 27)
    assert (answer["report"]["source"]["commit"], answer["val"]) == (hub.commit("Org/web"), 12)
    assert answer["report"]["reading"]["retries"] == 0


def test_compressed_lines_through_workers(client: Client) -> None:
    answer = client.ask({**PAJAMA, "num_workers": 1})
    assert (answer["sha"], answer["workers"]) == (expected(HUB_TEXTS), 1)


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

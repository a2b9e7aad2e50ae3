"""Data sets for `Hub`, a client process that reads them, and what it should come to when no hub is in between."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests import forkserver
from tests.data.corpora import files_config, items, module, write_jsonl
from tests.data.hub import Hub

ROOT = Path(__file__).parents[2]
FILES = 4
ROWS = 90  # in row groups of 10
TEXTS = [[f"file {f} row {i} " + "word " * (i % 9) for i in range(ROWS)] for f in range(FILES)]
WEB = {"repo": "Org/web", "train_files": ["sample/10BT/*.parquet"], "val_files": ["sample/10BT/003_00000.parquet"]}
PAJAMA = {"repo": "Org/pajama", "train_files": ["train/**/*.jsonl.zst"]}


def parquet(texts: list[str]) -> bytes:
    """As FineWeb-Edu has it: other columns beside the text; and invalid UTF-8 in one row."""
    values = pa.array([text.encode().replace(b"row 13 ", b"row 13\xe9") for text in texts], pa.binary())
    text = pa.StringArray.from_buffers(len(values), values.buffers()[1], values.buffers()[2])
    out = io.BytesIO()
    pq.write_table(pa.table({"text": text, "id": [str(i) for i in range(len(texts))]}), out, row_group_size=10)
    return out.getvalue()


def jsonl_zst(texts: list[str]) -> bytes:
    lines = "".join(json.dumps({"text": text, "meta": {"redpajama_set_name": "C4"}}) + "\n" for text in texts)
    return pa.Codec("zstd").compress(lines.encode(), asbytes=True)


def repos() -> dict[str, dict[str, bytes]]:
    """What a hub serves: parquet files under a card, and compressed lines; each set with an empty file among them."""
    card = (
        b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: sample/*/*\n---\n# card\n"
    )
    return {
        "Org/web": {"README.md": card} | {f"sample/10BT/00{f}_00000.parquet": parquet(TEXTS[f]) for f in range(FILES)},
        "Org/pajama": {"README.md": b"# card\n"}
        | {f"train/chunk{f}/part.jsonl.zst": jsonl_zst(TEXTS[f]) for f in range(FILES)},
    }


class Client:
    """`hub_client` in a process of its own."""

    def __init__(self, hub: Hub, home: Path, endpoint: str = "", **environment: str):
        endpoint = endpoint or hub.url
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1",
                       "HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_OFFLINE": "0", **environment}  # fmt: skip
        command = [sys.executable, "-m", "tests.data.hub_client"]
        self.hub = hub
        self.process = forkserver.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def ask(self, data: dict[str, Any], faults: Sequence[str] = (), steps: int = 30) -> Any:
        """The answer, where `faults` happen to what is requested after `setup`."""
        answer = self._exchange(json.dumps({"data": data, "steps": steps}))
        if answer == "ready":
            self.hub.faults[:] = faults
            answer = self._exchange("go")
            self.left, self.hub.faults[:] = len(self.hub.faults), []
        return json.loads(answer)

    def _exchange(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate()


def expected(units: list[list[str]], steps: int = 30) -> str:
    """The sha of the ids when the same units are read with no hub at all."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_jsonl(Path(folder, f"{i:03d}.jsonl"), texts) for i, texts in enumerate(units)]
        ids = items(module(files_config(paths), max_steps=steps))
    return hashlib.sha256(b"".join(batch.tobytes() for batch in ids)).hexdigest()


def web_units(files: int) -> list[list[str]]:
    texts = [[text.replace("row 13 ", "row 13\ufffd") for text in TEXTS[f]] for f in range(files)]
    return [texts[f][i : i + 10] for f in range(files) for i in range(0, ROWS, 10)]

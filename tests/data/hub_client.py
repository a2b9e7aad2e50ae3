"""Run in a process of its own (the hub's client reads HF_ENDPOINT when it is imported): asks the data layer.

Reads lines of JSON, {"data": changes of the configuration, "steps": n}, and answers each with a line {"sha": of the
steps' ids, "report": ..., "val": sequences} or {"error": class, "message": text}, and in either case {"waits": [seconds
that it would have waited]}. Between setup and the first step it writes "ready" and waits for a line.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
import time

from gpt2_fp8.config.data_schema import HubData, ValidationSet
from gpt2_fp8.config.errors import RunError
from gpt2_fp8.data import hub


def main(changes: dict[str, object], steps: int) -> dict[str, object]:
    from tests.data.corpora import items, module  # imports torch; a worker imports this file, and is to do without

    values: dict[str, object] = {
        "name": "hub", "kind": "hub", "revision": "main", "val_files": [], "text_column": "text", "tokenizer": "bytes",
        "num_workers": 0, "seed": 7, "val_sequences": 0, "cache_dir": None,
    }  # fmt: skip
    values |= changes
    sets: dict = changes.get("validation", {})  # type: ignore[assignment]
    values["validation"] = {name: ValidationSet(**one) for name, one in sets.items()}
    try:
        made = module(HubData(**values), max_steps=steps)  # type: ignore[arg-type]
        print("ready", flush=True)
        sys.stdin.readline()  # the test sets its faults now
        ids = items(made, steps)
        workers = len(multiprocessing.active_children())
        made.teardown()
        digest = hashlib.sha256(b"".join(batch.tobytes() for batch in ids)).hexdigest()
        val = sum(len(batch["ids"]) for batch in made.val_dataloader())
        return {"sha": digest, "report": made.report(), "val": val, "workers": workers, "sets": made.val_sets}
    except RunError as error:
        return {"error": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    hub.TIMEOUT_SECONDS = 1.0
    slept, waits = time.sleep, []

    def sleep(seconds: float) -> None:
        """The hub client's own waits between its tries, and what a server asks for."""
        waits.append(seconds)
        slept(min(seconds, 0.01))

    time.sleep = sleep
    for line in sys.stdin:
        waits.clear()
        request = json.loads(line)
        print(json.dumps(main(request["data"], request["steps"]) | {"waits": waits}), flush=True)

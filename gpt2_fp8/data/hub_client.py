"""The Hugging Face hub's client, with bounds on how long it waits: for an answer, and because a server says so."""

from __future__ import annotations

import logging
import os
import re
from functools import cache
from types import ModuleType
from typing import Any

from gpt2_fp8.compat import hub
from gpt2_fp8.data import retry

log = logging.getLogger(__name__)

TIMEOUT = 10.0  # seconds without a byte, after which a request has failed; the hub's client waits for ever in places


def import_datasets() -> ModuleType:
    """`datasets` with a client that does not wait for ever, and without its torch part, which keeps a tensor in every
    data set: unpickling one would import torch in every worker, for seconds and 300 MB each."""
    before = os.environ.get("USE_TORCH")
    os.environ["USE_TORCH"] = "0"
    try:
        import datasets
    finally:
        os.environ.pop("USE_TORCH")
        if before is not None:
            os.environ["USE_TORCH"] = before
    _bound_waits()
    return datasets


@cache
def _bound_waits() -> None:
    from huggingface_hub import set_client_factory

    def factory() -> Any:
        client = hub.default_client()
        client.timeout = TIMEOUT
        hooks = client.event_hooks
        client.event_hooks = hooks | {"response": [*hooks["response"], wait_as_told]}
        return client

    set_client_factory(factory)


def wait_as_told(response: Any) -> None:
    """Wait as long as a server asks that has refused an answer (HTTP 429 or 5xx), up to the longest of our own waits.

    huggingface_hub 1.x and 2.x would wait any time, for a day if told so, and without a sign of life, so that a worker
    would be taken for stuck. What it finds afterwards is an answer that asks for nothing: it tries again within 8 s.
    """
    asked = _asked(response.headers) if response.status_code == 429 or response.status_code >= 500 else None
    if asked is None:
        return
    seconds = min(float(asked), max(retry.HUB_WAITS))
    log.warning(
        "the hub asks for a wait of %d s (HTTP %d); trying again in %.0f s", asked, response.status_code, seconds
    )
    retry.sleep(seconds)
    for name in ("retry-after", "ratelimit"):
        response.headers.pop(name, None)


def _asked(headers: Any) -> int | None:
    """Seconds, by `Retry-After: N` or by a used-up `RateLimit: "name";r=0;t=N`; None where neither is there."""
    told = headers.get("retry-after", "").strip()
    if told.isascii() and told.isdigit():
        return int(told[:9])
    used_up = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})", headers.get("ratelimit", ""))
    return int(used_up[1]) if used_up else None

"""The Hugging Face hub's client, with bounds on its waits: for an answer, and when a server asks for a wait."""

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

TIMEOUT_SECONDS = 10.0  # without a byte before a request fails; the hub's client has waits without an end


def import_datasets() -> ModuleType:
    """Import `datasets` without its torch part, which would import torch in every worker."""
    before = os.environ.get("USE_TORCH")
    os.environ["USE_TORCH"] = "0"
    try:
        import datasets
    finally:
        os.environ.pop("USE_TORCH")
        if before is not None:
            os.environ["USE_TORCH"] = before
    datasets.disable_progress_bars()
    return datasets


@cache
def bound_waits() -> None:
    """Have the client's waits end. Every process that asks the hub begins with it."""
    from huggingface_hub import set_client_factory

    def factory() -> Any:
        client = hub.default_client()
        client.timeout = TIMEOUT_SECONDS
        hooks = client.event_hooks
        client.event_hooks = hooks | {"response": [*hooks["response"], wait_as_asked]}
        return client

    set_client_factory(factory)


def wait_as_asked(response: Any) -> None:
    """Wait as long as a server asks after refusing an answer (HTTP 429 or 5xx), at most our own longest wait.

    huggingface_hub 1.x and 2.x would wait any time, even a day, without a sign of life. The worker would then count as
    stuck. The headers that ask for a wait are removed, so the client tries again within 8 s.
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
    """Return the seconds in `Retry-After: N`, or in a used-up `RateLimit: "name";r=0;t=N`; None without either."""
    after = headers.get("retry-after", "").strip()
    if after.isascii() and after.isdigit():
        return int(after[:9])
    used_up = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})", headers.get("ratelimit", ""))
    return int(used_up[1]) if used_up else None

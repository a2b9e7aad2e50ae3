"""The hub's own HTTP client. Holds for `huggingface-hub>=1,<3`."""

from __future__ import annotations

from typing import Any


def default_client() -> Any:
    """Return a new client as huggingface_hub makes it, with its hooks for offline mode and for request ids.

    `set_client_factory` is public and replaces the factory. The replaced factory has no public name.
    """
    from huggingface_hub.utils import _http

    return _http.default_client_factory()

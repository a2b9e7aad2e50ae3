"""Keys that people bring from other programs, or that the libraries once had: why they are none here, what to type."""

from __future__ import annotations

from gpt2_fp8.config import foreign_model_keys, foreign_run_keys, foreign_values

# Looked up by the whole path first, then by its last part.
KEYS: dict[str, tuple[str, str]] = foreign_model_keys.KEYS | foreign_run_keys.KEYS


def advice(path: str, typed: object = None) -> tuple[str, str] | None:
    """Return cause and remedy for a key of another program, or None. `typed`: the value that it was given."""
    plain = path.replace("-", "_")
    leaf = plain.rpartition(".")[2]
    found = KEYS.get(plain) or KEYS.get(leaf)
    return found and (f"there is no key {path}: {found[0]}", foreign_values.kept(leaf, typed) or found[1])

"""Small tokenizers in the two kinds of file: Llama 3's ranks, and a `tokenizer.json`."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

MERGED = [b"th", b"the", b" the", b"in", b"ing", b"12", b"123", b"\n\n", b"..", b" a", "é".encode()]
RANKS = [*(bytes([value]) for value in range(256)), *MERGED]


def write_ranks(path: Path, ranks: list[bytes] = RANKS) -> Path:
    """Write a rank file: a token in base64 and its rank on each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)))
    return path


def write_json(folder: Path, words: list[str], special: list[str], eos: Any = None) -> Path:
    """Write a `tokenizer.json` that knows `words` between blanks, then the special tokens; and what says its end."""
    folder.mkdir(parents=True, exist_ok=True)
    added = [
        {"id": len(words) + i, "content": token, "special": True} | dict.fromkeys(_FLAGS, False)
        for i, token in enumerate(special)
    ]
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": words[0]}
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    text = {"version": "1.0", **rest, "added_tokens": added, "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")

"""Whether a run's documents begin or end with the separator, which `document_mask` has to know.

Text is tokenised here, and each of its documents ends with the separator. A file of ids has been made elsewhere. The
documents of llm.c and modded-nanogpt begin with it, and those of nanoGPT end with it. The header tells these apart.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from gpt2_fp8.config import globs, mixture
from gpt2_fp8.config.data_schema import Mixed, TextOfARun, TokenFilesData
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.schema import RunConfig

LLM_C, LLAMA_3 = 20240520, 20240801  # the magic numbers of its headers; `data/token_format.py` reads the rest
_WITHOUT = "document_mask=false"


def begin_with_separator(data: TextOfARun) -> bool:
    """Return whether the documents of a run's text begin with the separator. Reads 4 bytes of each file of ids."""
    return any(begins for _, source in mixture.sources_of(data) for begins, _ in _kinds(source))


def check(config: RunConfig) -> Iterator[Finding]:
    """Find text for which no single rule says which document a separator belongs to."""
    if not config.document_mask:
        return
    seen: dict[bool, str] = {}
    for name, source in mixture.sources_of(config.data):
        key = f"data.sources.{name}.train_files" if name else "data.train_files"
        if of_llama := next((path for _, path in _kinds(source) if path and _magic(path) == LLAMA_3), None):
            cause = f"document_mask=true: documents begin with <|begin_of_text|> in {of_llama}, llm.c's for Llama 3"
            remedy = f"{_WITHOUT}, or tokenise the text here: data=text_files"
            yield Finding(("document_mask", key), Problem(cause, remedy))
            return
        for begins, path in _kinds(source):
            seen.setdefault(begins, str(path) if path else f"source {name}")
    if len(seen) > 1:
        cause = f"document_mask=true: documents begin with the separator in {seen[True]}, end with it in {seen[False]}"
        problem = Problem(cause, f"{_WITHOUT}, or text of one kind")
        yield Finding(("document_mask", "data.train_files", "data.val_files", "data.sources"), problem)


def _kinds(source: Mixed) -> Iterator[tuple[bool, Path | None]]:
    """Yield, for each file of ids of a source, whether its documents begin with the separator; for text, False once."""
    if not isinstance(source, TokenFilesData):
        yield False, None
        return
    for pattern in [*source.train_files, *source.val_files]:
        for path in globs.find(pattern):
            if not globs.why_not(path):  # else `paths` says it
                yield _magic(path) in (LLM_C, LLAMA_3), path


def _magic(path: Path) -> int:
    """Return the first number of a file; 0 if it has none."""
    try:
        with path.open("rb") as file:
            (number,) = struct.unpack("<i", file.read(4))
    except (OSError, struct.error):
        return 0
    return int(number)

"""A file of settings as YAML's nodes, before anything is built from them. An alias costs nothing until written out."""

from __future__ import annotations

import re

import yaml  # type: ignore[import-untyped]

from gpt2_fp8.config.shown import line

_ALL_PRINTABLE = re.compile(r"[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]*")


def read(data: bytes) -> tuple[str, list[yaml.Node]]:
    """Return the text of a file, and its documents as nodes.

    Raises ValueError with the reason if it is no YAML in UTF-8.
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("it is UTF-16, and settings are UTF-8: save it as that")
    if data.startswith(b"\xef\xbb\xbf"):
        raise ValueError("it begins with a byte-order mark, behind which Hydra sees no header: save it without")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8: save it as UTF-8") from None
    if bad := _ALL_PRINTABLE.match(text).end() - len(text):  # type: ignore[union-attr]
        sign = text[bad]
        raise ValueError(f"line {text[:bad].count(chr(10)) + 1} has the control character {sign!r}")
    try:
        return text, list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ValueError(_yaml_error(text, error)) from None


def _yaml_error(text: str, error: Exception) -> str:
    """Say what is wrong with a file that is no YAML, and where."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return line(" ".join(str(error).split()), 200)
    lines = text.splitlines()
    words = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in words[: len(words) - len(words.lstrip())] or "'\\t'" in str(getattr(error, "problem", "")):
        return f"line {mark.line + 1} is indented with a tab, and YAML takes blanks"
    return line(f"line {mark.line + 1}: {getattr(error, 'problem', None) or 'it is no YAML'}", 200)

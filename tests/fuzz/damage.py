"""What may become of a file's bytes on a disk, or in a stranger's hands."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_WHERE = st.floats(0, 1, exclude_max=True)  # a part of the file
_BYTES = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [b"\0" * 300, b"\xff" * 40, b"\n", b"\r", b'"', b",", b"\x1b[2J", b"\xef\xbb\xbf", b"9" * 400, b"[" * 3000]
    ),
    st.just(b"x" * 200_000),
).map(lambda data: data.decode("latin-1"))
DAMAGE = st.one_of(
    st.tuples(st.just("flip"), _WHERE, st.integers(0, 7)),
    st.tuples(st.just("cut"), _WHERE, st.just(0)),
    st.tuples(st.just("insert"), _WHERE, _BYTES),
    st.tuples(st.just("replace"), _WHERE, _BYTES),
    st.tuples(st.just("append"), st.just(0.0), _BYTES),
    st.tuples(st.just("empty"), st.just(0.0), st.just(0)),
).map(list)


def damage(content: bytes, done: list[list[Any]]) -> bytes:
    """`content` after what was done to it."""
    for what, where, with_ in done:
        at = int(where * len(content))
        if what == "flip" and content:
            content = content[:at] + bytes([content[at] ^ 1 << with_]) + content[at + 1 :]
        elif what == "cut":
            content = content[:at]
        elif what == "insert":
            content = content[:at] + with_.encode("latin-1") + content[at:]
        elif what == "replace":
            new = with_.encode("latin-1")
            content = content[:at] + new + content[at + len(new) :]
        elif what == "append":
            content += with_.encode("latin-1")
        elif what == "empty":
            content = b""
    return content

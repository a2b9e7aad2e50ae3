"""Data files: documents of all kinds of characters in all kinds of files, sound and damaged. What is right: what a
reader of the formats' own libraries finds in them, each document once, in its place."""

from __future__ import annotations

import io
import json
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import strategies as st

from tests.fuzz.damage import DAMAGE, damage
from tests.fuzz.place import SMALL, Place
from tests.fuzz.promise import REFUSED
from tests.fuzz.reading import BOM, EOT, collapsed, documents_of

FILLER = "the words of a document that is long enough, and of another "
TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["", " ", "\n", "\t\r\n", "\0", "\ufeff", "\ufeffx", "a\0b", "<|endoftext|>", "\x1b[2J", "\u2028",
        "\x85",
                     "\ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace"), "x" * 3000, "a\r\nb",
                     "\x0c", "\x1c"]),
    st.just(FILLER * 3),
)  # fmt: skip
ODD = st.sampled_from([None, 5, True, ["x"], {"a": 1}, 1e300])
LINES = st.sampled_from([
    "", "   ", "x", "{", "[]", "5", "null", '"x"', '{"other": 1}', '{"text": "a"', '{"text": "a"} x',
    '{"text": "a", "text": "b"}',
    '{"text": "\\ud800"}', '{"text": "\\ud83d\\ude00"}', '{"text": "\\u0000"}', '{"text": NaN}', '{"text": 1e999}',
    '{"x": ' + "9" * 5000 + ', "text": "t"}', "[" * 5000, '{"text": "\udcff\udc80"}', '{"text": "\udce2\udc82"}',
    '{"text": "a\tb"}',
    "\ufeff" + '{"text": "b"}', '{"text": "c"}\r', "\r", "\0", '{"TEXT": "x"}', '{"text\\u0000": "x"}', "\x1b[2J",
])  # fmt: skip
ENDINGS = [".txt", ".jsonl", ".jsonl.zst", ".parquet"]


@st.composite
def _cases(draw: Any) -> dict[str, Any]:
    kind = draw(st.sampled_from(ENDINGS))
    documents = draw(st.lists(TEXTS, max_size=6)) + [FILLER * 4] * draw(st.sampled_from([0, 1, 2, 3, 3, 4]))
    return {
        "kind": kind,
        "name": draw(
            st.sampled_from([f"a{kind}"] * 20 + ["a.txt", "a.jsonl", "a.jsonl.zst", "a.parquet", f"A{kind.upper()}"])
        ),
        "documents": [
            draw(ODD) if draw(st.sampled_from([False] * 6 + [True])) else text
            for text in draw(st.permutations(documents))
        ],
        "lines": draw(st.lists(st.tuples(st.integers(0, 9), LINES), max_size=2)) if "jsonl" in kind else [],
        "bom": draw(st.sampled_from([False] * 6 + [True])),
        "last_newline": draw(st.booleans()),
        "form": draw(st.integers(0, 5)),
        "damage": draw(st.one_of(st.just([]), st.just([]), st.lists(DAMAGE, min_size=1, max_size=2))),
        "val_fraction": draw(st.sampled_from([0, 0, 0.5])),
        "workers": draw(st.sampled_from([0] * 9 + [1])),
    }


CASES = _cases()


def try_one(case: dict[str, Any], place: Place, typed: bool = False) -> str:
    """Train on the file. Where the run begins, its tokens are those of the file's documents; a sound file is taken."""
    content = damage(_content(case), case["damage"])
    path = place.here / "texts" / case["name"]
    path.parent.mkdir()
    path.write_bytes(content)
    fraction = case["val_fraction"]
    outcome = place.run(
        *SMALL, "data=text_files", f"data.train_files=[texts/{case['name']}]", f"data.val_fraction={fraction}",
        f"data.val_sequences={4 if fraction else 0}", "data.tokenizer=bytes", f"data.num_workers={case['workers']}",
        "data.cache_dir=cache", "run_name=run", typed=typed,
    )  # fmt: skip
    try:
        found = documents_of(case["name"].lower(), content)
    except Exception as error:  # whatever a library says of a damaged file
        place.expect(outcome.code == REFUSED, f"exit {outcome.code}, where {type(error).__name__}: {error}")
        return str(outcome.code)
    whole = [t for texts in found for t in texts]
    if outcome.code == 0:
        _compare(case, place, found)
        _trained(case, place, outcome.noted("ids"), whole)
    elif _is_sound(case) and sum(len(t) for t in whole) > 17:
        place.expect(False, f"a sound file is refused: {outcome.stderr[:300]!a}")
    return str(outcome.code)


def _is_sound(case: dict[str, Any]) -> bool:
    """Whether nothing is wrong with the file but single documents, and all of it is for training."""
    told = case["kind"] in (".txt", ".parquet") or not case["lines"]
    same = case["name"].lower().removeprefix("a") == case["kind"]
    return told and same and not case["damage"] and not case["val_fraction"]


def _content(case: dict[str, Any]) -> bytes:
    kind, form, documents = case["kind"], case["form"], case["documents"]
    bom = BOM if case["bom"] and kind != ".parquet" else b""
    if kind == ".txt":
        return bom + "\n".join(str(d) for d in documents).encode(errors="replace")
    if kind == ".parquet":
        return _parquet(form, [d if isinstance(d, str) else None for d in documents])
    lines = [json.dumps({"text": d}, ensure_ascii=form % 2 == 0) for d in documents]
    for at, line in case["lines"]:
        lines.insert(at, line)
    text = ("\r\n" if form == 5 else "\n").join(lines) + ("\n" if case["last_newline"] else "")
    content = bom + text.encode(errors="surrogateescape")
    if kind == ".jsonl":
        return content
    packer = zstandard.ZstdCompressor(write_checksum=form != 1, write_content_size=form != 2)
    half = len(content) // 2 if form == 3 else len(content)  # of two frames
    parts = [content[:half], content[half:]] if form == 3 else [content]
    empty = zstandard.ZstdCompressor().compress(b"") if form == 4 else b""
    return empty + b"".join(packer.compress(part) for part in parts)


def _parquet(form: int, documents: list[str | None]) -> bytes:
    types = [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.string(),
    ]
    column = pa.array(documents, pa.string()).cast(types[form % 5])
    buffer = io.BytesIO()
    pq.write_table(
        pa.table({"id": list(range(len(documents))), "text": column}), buffer, row_group_size=[1, 2, 100][form % 3],
        compression=["snappy", "zstd", "none", "gzip", "lz4", "snappy"][form], write_page_checksum=form == 2,
    )  # fmt: skip
    return buffer.getvalue()


def _compare(case: dict[str, Any], place: Place, found: list[list[list[int]]]) -> None:
    """Each unit that was kept on disk is one of the file's, to the last token."""
    kept = sorted((place.here / "cache").glob("*.json"))
    place.expect(kept, "nothing was kept in data.cache_dir")
    sides = []
    for texts in found:
        sides.append(texts)
        held = [zlib.crc32(bytes(t[:-1])) < case["val_fraction"] * 2**32 for t in texts]
        sides += [[t for t, val in zip(texts, held, strict=True) if val is side] for side in (True, False)]
    for about in kept:
        tokens = _kept(about)
        if case["name"].lower().endswith(".txt"):
            whole = bytes(t for t in [*found[0], [EOT]][0] if t != EOT)
            right = case["val_fraction"] or tokens in ([*whole, EOT], [*whole.removeprefix(BOM), EOT])
        else:
            sure = _sure if case["val_fraction"] else list
            right = any(sure(tokens) == sure([t for text in texts for t in text]) for texts in sides)
        place.expect(right, f"other tokens than the file's: {tokens[:40]}")


def _sure(tokens: list[int]) -> list[int]:
    """The documents of which it is known whether they are held out: not by how many U+FFFD stand for bad bytes."""
    ends = [-1, *(i for i, token in enumerate(tokens) if token == EOT)]
    documents = [tokens[start + 1 : stop + 1] for start, stop in pairwise(ends)]
    return [t for text in documents if bytes([0xEF, 0xBF, 0xBD]) not in bytes(text[:-1]) for t in text]


def _kept(about: Path) -> list[int]:
    said = json.loads(about.read_text())
    tokens = np.frombuffer(about.with_suffix(".u16").read_bytes(), "<u2", said["tokens"]).tolist()
    return collapsed(tokens)


def _trained(case: dict[str, Any], place: Place, ids: list[Any], whole: list[list[int]]) -> None:
    """Every document that a trained sequence has from end to end is one of the file's."""
    texts = {bytes(text[:-1]) for text in whole}
    for row in (row for step in ids for row in step) if not case["name"].lower().endswith(".txt") else ():
        ends = [i for i, token in enumerate(row) if token == EOT]
        for start, stop in pairwise(ends):
            inner = bytes(collapsed(row[start + 1 : stop]))
            place.expect(inner in texts, f"trained on a document that is not in the file: {inner[:40]!r}")

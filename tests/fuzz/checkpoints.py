"""Checkpoints: damaged on the disk, and forged by someone who made every digest right."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from gpt2_fp8.checkpoint.manifest import sealed
from tests.fuzz.damage import DAMAGE, damage
from tests.fuzz.place import SMALL, Place
from tests.fuzz.promise import Broken
from tests.fuzz.run_folder import ON, STEPS, continued, lay, same, weights_of

PARTS = ["model.safetensors", "optimizer.safetensors", "state.safetensors", "state.json", "manifest.json"]
ODD = st.sampled_from(["gone", "folder", "link", "pipe", "empty"])
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([
        2**31, 2**63, 2**64, 10**18, -(2**63), 10**400, 1e308, -1.0, 0.0, 5e-324, "\x1b[2J", "x" * 5000,
        "../../beside/file", [], {},
        [[]], [0] * 50, {"a": 1}, {"$int": "0x" + "f" * 400}, {"$int": "-0x1"}, {"$int": "zz"}, {"$float": "nan"},
        {"$float": "-inf"},
        {"$tensor": "state_dict.tokens.weight"}, {"$tensor": "rng.0.torch"}, {"$tensor": "nope"}, {"$tuple": []},
        {"$dict": [[0, 1]]},
        {"$dict": [[[], 1]]}, {"$ordered": [["a", {"$float": "inf"}]]}, {"$x": 1},
        {"_target_": "os.mkdir", "path": "canary"}, "DROP",
    ]),
)  # fmt: skip
NUMBERS = st.sampled_from(["nan", "inf", "huge", "tiny", "zero", "negative"])


@st.composite
def _cases(draw: Any) -> dict[str, Any]:
    how = draw(st.integers(0, 11))
    return {
        "way": draw(st.sampled_from(["last", "last", "best", "path", "init_from"])),
        "part": draw(st.sampled_from(PARTS)),
        "damage": draw(st.lists(DAMAGE, min_size=1, max_size=2)) if how in (0, 1) else [],
        "odd": draw(ODD) if how == 2 else "",
        # forged: [which of the places of a tree, what comes there]
        "state": draw(st.lists(st.tuples(st.integers(0, 10**6), VALUES), min_size=1, max_size=2))
        if 3 <= how <= 8
        else [],
        "manifest": draw(st.lists(st.tuples(st.integers(0, 10**6), VALUES), min_size=1, max_size=1))
        if how == 9
        else [],
        "header": draw(st.lists(st.tuples(st.integers(0, 10**6), VALUES), min_size=1, max_size=1)) if how == 10 else [],
        "numbers": [draw(st.integers(0, 10**6)), draw(NUMBERS)] if how == 11 else [],
    }


CASES = _cases()


def try_one(case: dict[str, Any], place: Place, typed: bool = False) -> str:
    """Continue from the last step's checkpoint, or take its weights. Where the run begins, it has the weights of the
    step that it says; of one that was damaged, never."""
    run = lay(place)
    path = run / f"checkpoints/step-{STEPS:08d}"
    true = {step: weights_of(path.with_name(f"step-{step:08d}")) for step in range(1, STEPS + 1)}
    damaged = _spoil(path, case)
    if case["way"] == "init_from":
        outcome = place.run(*SMALL, "run_name=other", f"init_from={path.relative_to(place.here)}", typed=typed)
        if outcome.code == 0 and not typed:
            place.expect(same(outcome.noted("weights")[0], weights_of(path)), "other weights than the checkpoint's")
            place.expect(not damaged, "weights were taken from a damaged checkpoint")
        return str(outcome.code)
    way = str(path.relative_to(place.here)) if case["way"] == "path" else case["way"]
    outcome = place.run(*ON, f"ckpt_path={way}", typed=typed)
    if outcome.code == 0 and not typed:
        step = continued(outcome, place, true=False)
        if step is not None:
            weights = outcome.noted("weights")[0]
            here = path if step == STEPS else path.with_name(f"step-{step:08d}")
            right = true[step] if damaged or step != STEPS else _read(here)
            place.expect(same(weights, right), f"other weights than those of step {step}")
            place.expect(step != STEPS or not damaged, "continued from a damaged checkpoint")
    return str(outcome.code)


def _read(path: Path) -> dict[str, str]:
    try:
        return weights_of(path)
    except Exception as error:
        raise Broken(f"continued from weights of which safetensors says {type(error).__name__}: {error}") from None


def _spoil(path: Path, case: dict[str, Any]) -> bool:
    """Do to a checkpoint what the case says; whether its digests show it."""
    part = path / case["part"]
    before = part.read_bytes()
    if case["odd"]:
        part.unlink()
        _put_odd(part, case["odd"], before)
        return True
    if case["damage"]:
        part.write_bytes(damage(before, case["damage"]))
        return part.read_bytes() != before and not _says_the_same(case["part"], before, part.read_bytes())
    if case["state"]:
        _forge(path, "state.json", _changed(json.loads((path / "state.json").read_text()), case["state"]))
    elif case["header"] or case["numbers"]:
        name = case["part"] if case["part"].endswith("safetensors") else PARTS[0]
        _forge(path, name, _with_header((path / name).read_bytes(), case))
    else:
        manifest = json.loads(_changed(json.loads((path / "manifest.json").read_text()), case["manifest"]))
        (path / "manifest.json").write_text(json.dumps(sealed(manifest) if isinstance(manifest, dict) else manifest))
    return False


def _says_the_same(part: str, before: bytes, after: bytes) -> bool:
    """White space behind the manifest's end changes nothing of what it says."""
    if part != "manifest.json":
        return False
    try:
        return bool(json.loads(before) == json.loads(after))
    except (ValueError, RecursionError):
        return False


def _put_odd(part: Path, what: str, content: bytes) -> None:
    if what == "folder":
        part.mkdir()
    elif what == "link":
        part.with_suffix(".real").write_bytes(content)
        part.symlink_to(part.with_suffix(".real").name)
    elif what == "pipe":
        os.mkfifo(part)
    elif what == "empty":
        part.touch()


def _forge(path: Path, name: str, content: bytes) -> None:
    """Write a file, and make the manifest fit, as its author can."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(sealed(manifest)))


def _changed(tree: Any, changes: list[list[Any]]) -> bytes:
    """An object of JSON with other values in some of its places."""
    for at, value in changes:
        top = sorted(tree)[at % len(tree)]  # or else the optimizer's many tensors would be all
        places = [(tree, top), *_places(tree[top])]
        holder, key = places[at // len(tree) % len(places)]
        if value == "DROP":
            del holder[key]
        else:
            holder[key] = value
    return json.dumps(tree).encode()


def _places(tree: Any) -> Any:
    """Every (holder, key) in a tree; of a long list the first few, or else random numbers' state would be all."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree[:4]) if isinstance(tree, list) else ()
    for key, value in list(entries):
        yield tree, key
        yield from _places(value)


def _with_header(content: bytes, case: dict[str, Any]) -> bytes:
    size = struct.unpack("<Q", content[:8])[0]
    header, body = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    if case["header"]:
        text = _changed(header, case["header"])
        return struct.pack("<Q", len(text)) + text + bytes(body)
    at, what = case["numbers"]
    names = [name for name, said in header.items() if name != "__metadata__" and said["dtype"] == "F32"]
    if names:
        value = {"nan": float("nan"), "inf": float("inf"), "huge": 3e38, "tiny": 1e-45, "zero": 0.0, "negative": -1.0}[
            what
        ]
        start, stop = header[names[at % len(names)]]["data_offsets"]
        body[start:stop] = struct.pack("<f", value) * ((stop - start) // 4)
    return content[: 8 + size] + bytes(body)

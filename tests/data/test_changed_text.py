"""Text that changes under a run, its files' names and sizes staying the same."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2_fp8.config.errors import UserError
from tests.data.corpora import files_config, items, module, write_jsonl
from tests.runs import train

pytestmark = pytest.mark.whole

CHANGED = "the text changed under this run"


def change(path: Path) -> None:
    about = path.stat()
    path.write_text(path.read_text().replace("<", "["))
    assert path.stat().st_size == about.st_size
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 10**9))


def file_of(made: Any, unit: int) -> Path:
    return Path(made.text.corpus.train[unit].path)


def begun(made: Any, steps: int) -> list[int]:
    out: list[int] = []
    for item in made.train_dataloader():
        out += item["cursor"]["units"]
        made.advance(item["cursor"])
        if item["cursor"]["step"] == steps:
            return out
    raise AssertionError


def refusal(action: Any) -> str:
    with pytest.raises(UserError) as told:
        action()
    return str(told.value)


def test_changed_text_is_refused_by_the_run_that_goes_on(tmp_path: Path) -> None:
    lines = [f"line {i} of a text that is long enough to be cut into many sequences\n" for i in range(300)]
    text = tmp_path / "text.txt"
    text.write_text("".join(lines))
    words = ["data=text_files", f"data.train_files=[{text}]", "data.tokenizer=bytes", "data.num_workers=0",
             "data.val_sequences=2", "data.val_fraction=0.1"]  # fmt: skip
    train(tmp_path / "run", *words, "trainer.max_steps=2")
    lines[100] = lines[100].replace("cut", "hit")
    text.write_text("".join(lines))
    told = refusal(lambda: train(tmp_path / "run", *words, "trainer.max_steps=4", "ckpt_path=last"))
    assert CHANGED in told
    assert str(text) in told


def test_only_a_unit_that_was_read_is_held_to_what_it_was(many_units: Path) -> None:
    config = files_config(many_units, num_workers=2)
    made = module(config, max_steps=40)
    seen = begun(made, 5)
    state = json.loads(json.dumps(made.state_dict()))
    unread = next(i for i in range(70) if i not in seen)
    made.teardown()

    def go_on() -> list[np.ndarray]:
        again = module(config, max_steps=40)
        try:
            again.load_state_dict(state)
            return items(again, 35)
        finally:
            again.teardown()

    change(file_of(made, unread))  # nothing was trained on it yet
    go_on()
    change(file_of(made, seen[-1]))
    assert file_of(made, seen[-1]).name in refusal(go_on)


def test_a_checkpoint_without_digests_goes_on(many_units: Path) -> None:
    config = files_config(many_units)
    made = module(config, max_steps=60)
    whole = items(made, 60)
    first = module(config, max_steps=60)
    items(first, 40)
    state = first.state_dict()
    del state["digests"]
    again = module(config, max_steps=60)
    again.load_state_dict(state)
    assert all(np.array_equal(a, b) for a, b in zip(items(again, 20), whole[40:], strict=True))
    assert again.state_dict()["digests"]["train"] != made.state_dict()["digests"]["train"]  # of what it has read since
    module(config, max_steps=60).load_state_dict(again.state_dict())


def test_validation_text_is_held_to_what_it_was(many_units: Path) -> None:
    """Whether other text stands in the same file, or another file was chosen: the best is compared over it."""
    val = write_jsonl(many_units.parent / "val.txt", ["<" * 500])
    other = write_jsonl(many_units.parent / "other.txt", ["z" * 500])
    config = files_config(many_units, val_files=[str(val)], val_sequences=4)
    made = module(config)
    items(made, 3)
    state = made.state_dict()
    chosen = module(files_config(many_units, val_files=[str(other)], val_sequences=4))
    assert "the validation text" in refusal(lambda: chosen.load_state_dict(state))
    module(files_config(many_units, val_files=[str(other)], val_sequences=0)).load_state_dict(state)
    change(val)
    assert "the validation text" in refusal(lambda: module(config).load_state_dict(state))

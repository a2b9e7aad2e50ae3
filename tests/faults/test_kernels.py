"""Faults 127 and 129: kernels that are there and do not work; ids that a vocabulary has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import reader
from tests.data.corpora import files_config, module, write_jsonl


class Strange:
    """A tokenizer that gives an id which it has not."""

    name, eot_token, n_vocab = "strange", 256, 257

    def encode_to_numpy(self, text: str, disallowed_special: Any) -> Any:
        return np.array([65, 60000, 66], dtype=np.uint32)


def test_129_an_id_that_the_tokenizer_has_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["some words of a document"] * 40)
    monkeypatch.setattr(reader, "load_tokenizer", lambda name: Strange())
    with pytest.raises(UserError, match=r"a\.jsonl.* the id 60000 of a vocabulary of 257\n +fix: "):
        module(files_config(path))

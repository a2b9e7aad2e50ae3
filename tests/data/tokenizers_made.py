"""Small tokenizers in the two kinds of file: Llama 3's ranks, and a `tokenizer.json`."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

MERGED = [b"th", b"the", b" the", b"in", b"ing", b"12", b"123", b"\n\n", b"..", b" a", "é".encode()]
RANKS = [*(bytes([value]) for value in range(256)), *MERGED]


def write_ranks(path: Path, ranks: list[bytes] = RANKS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)))
    return path


def write_json(folder: Path, words: list[str], special: list[str], eos: Any = None) -> Path:
    """Write a `tokenizer.json` that knows `words` between blanks, then the special tokens; and what says its end."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


def write_trained(folder: Path, kind: str, text: str) -> Path:
    """Write a tokenizer that was trained on `text`; the config beside it is of a model with a BOS and another end."""
    folder.mkdir(parents=True, exist_ok=True)
    made = KINDS[kind]()
    special = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if "bytes" in kind else []
    trainer = trainers.UnigramTrainer if kind == "unigram" else trainers.BpeTrainer
    more = {"unk_token": "<unk>"} if kind == "unigram" else {}
    made.train_from_iterator(
        text.split("\n\n"),
        trainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False, **more),
    )
    if kind == "llama":  # which has no pre-tokenizer
        made.pre_tokenizer = None
    bos = ("<s>", made.token_to_id("<s>"))
    begin = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[bos])
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    made.enable_truncation(7)
    made.enable_padding(length=9)
    made.save(str(folder / "tokenizer.json"))
    beside = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside | {"model_max_length": 131072}))
    return folder


def _llama() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("▁+[^▁\n]*|[^▁]"), "isolated")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


def _metaspace(scheme: str, model: Any = None) -> Tokenizer:
    made = Tokenizer(model or models.BPE(unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return made


def _byte_level(prefix: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "llama": _llama, "metaspace, first": lambda: _metaspace("first"),
    "metaspace, always": lambda: _metaspace("always"), "unigram": lambda: _metaspace("always", models.Unigram()),
    "bytes": lambda: _byte_level(False), "bytes, with a blank in front": lambda: _byte_level(True),
}  # fmt: skip

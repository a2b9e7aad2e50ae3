"""A run's tokenizer as the two files of a Hugging Face folder, which `AutoTokenizer` loads without any code of ours.

GPT-2's, Llama 3's and the plain bytes are byte-pair encodings. Their files are made from the tokens and their ranks,
which say all: the two parts of a token are what is left of its bytes when every merge of a lower rank is done.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from gpt2_fp8.config import tokenizer_file
from gpt2_fp8.data.tokenizer import END_OF_TEXT, LLAMA3_PATTERN, llama3_special_tokens, load_tokenizer

CONFIG, TOKENIZER = tokenizer_file.CONFIG, "tokenizer.json"
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def files_of(name: str, n_positions: int) -> dict[str, bytes]:
    """Return the files of the tokenizer `data.tokenizer=name` by their names, for a model of `n_positions` tokens.

    Raises UserError for a tokenizer that cannot be loaded.
    """
    if name not in tokenizer_file.NAMES:
        found = tokenizer_file.describe(path := tokenizer_file.find(name), content := tokenizer_file.read(path))
        if found.ranks is None:  # without what training leaves out: a post-processor adds special tokens
            file = json.loads(content) | dict.fromkeys(("truncation", "padding", "post_processor"))
            ends = next(token["content"] for token in file["added_tokens"] if token["id"] == found.separator)
        else:
            special = llama3_special_tokens(len(found.ranks))
            file = _byte_pairs(found.ranks, special, LLAMA3_PATTERN)
            ends = tokenizer_file.END_OF_TEXT
    else:
        encoding: Any = load_tokenizer(name)  # of tiktoken's, as both named ones are
        tokens = encoding.token_byte_values()
        ranks = {token: encoding.encode_single_token(token) for token in tokens}
        file = _byte_pairs(ranks, {END_OF_TEXT: encoding.eot_token}, cut=name == "gpt2")
        ends = END_OF_TEXT
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": ends,  # it also begins a text in generation
        "eos_token": ends,
        "model_max_length": n_positions,
        "clean_up_tokenization_spaces": False,
    }
    texts = {TOKENIZER: file, CONFIG: config}
    return {name: (json.dumps(text, ensure_ascii=False, indent=1) + "\n").encode() for name, text in texts.items()}


def _byte_pairs(ranks: dict[bytes, int], special: dict[str, int], pattern: str = "", cut: bool = False) -> Any:
    """Return a `tokenizer.json` of ranks. Text is cut by `pattern`, or by GPT-2's if `cut`, before bytes are merged."""
    letters = _letters()
    shown = {token: "".join(letters[byte] for byte in token) for token in ranks}
    ordered = sorted(ranks, key=ranks.__getitem__)
    merges = [[shown[part] for part in _parts(token, ranks)] for token in ordered if len(token) > 1]
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": cut}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": number, "content": text, **_FLAGS} for text, number in special.items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, as_bytes]} if pattern else as_bytes,
        "decoder": as_bytes,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": True,  # a piece that is a token is that token, as in tiktoken
            "vocab": {shown[token]: ranks[token] for token in ordered}, "merges": merges,
        },
    }  # fmt: skip


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two tokens that the merge of `token`'s own rank joins."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        least = min(range(len(joined)), key=joined.__getitem__)
        parts[least : least + 2] = [parts[least] + parts[least + 1]]
    return parts


def _letters() -> dict[int, str]:
    """Return the letter that stands for each byte in a `tokenizer.json`.

    GPT-2's (Radford et al. 2019, encoder.py): a byte that Latin-1 prints is itself, the others are U+0100 and on.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + i) for i, byte in enumerate(others)}

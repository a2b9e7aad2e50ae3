"""The text of ids that come one by one: whole characters alone, although a token may end within one."""

from __future__ import annotations

from collections.abc import Sequence

from gpt2_fp8.data.tokenizer_files import Tokenizer

_INCOMPLETE = "\ufffd"  # what decoding puts in the place of bytes that are no character


class TextStream:
    """Gives text as soon as it is certain. What it has given in all is the text of all ids after those of `prompt`.

    Only the newest ids are decoded: those since the last certain character, and the piece before them, since some
    tokenizers drop a blank in front of a first word.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._decode = tokenizer.decode
        self._ids = list(prompt)
        self._before, self._certain = 0, len(prompt)  # ids from the first on are decoded; up to the second: given

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete; "" while a character is incomplete."""
        self._ids.extend(ids)
        text = self._decode(self._ids[self._before :])
        if text.endswith(_INCOMPLETE):
            return ""
        return self._take(text)

    def end(self) -> str:
        """Return what is left at the end of a text, with a mark for a character that was not completed."""
        return self._take(self._decode(self._ids[self._before :]))

    def _take(self, text: str) -> str:
        given = self._decode(self._ids[self._before : self._certain])
        self._before, self._certain = self._certain, len(self._ids)
        return text[len(given) :]

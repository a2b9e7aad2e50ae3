"""Files of token ids as a corpus: somebody has tokenised the text already, and no tokens are cached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.data import token_format
from gpt2_fp8.data.files import ALL_HELD_OUT, both_sides
from gpt2_fp8.data.ids import Tokens
from gpt2_fp8.data.progress_log import ProgressLog
from gpt2_fp8.data.retry import LOCAL_WAITS
from gpt2_fp8.data.units import Corpus, Unit


@dataclass
class TokenFilesSource:
    """Files by path or glob, as `token_format` reads them. A unit is a range of a file, and its ids stay in order.

    `headerless`: the dtype of the ids of files without a header, `uint16` or `uint32`.
    """

    train_files: list[str]
    val_files: list[str]
    headerless: str
    waits: tuple[float, ...] = LOCAL_WAITS

    def corpus(self) -> Corpus:
        """Return the units of all files, in the order of the patterns and of the sorted names within each.

        Raises UserError: every pattern without a match, and every file that is none of token ids.
        """
        problems: list[Problem] = []
        train, val = both_sides(self.train_files, self.val_files, (token_format.ENDING,), problems)
        looking = ProgressLog("looking into files", len(train) + len(val))
        for done, path in enumerate([*train, *val]):
            looking.at(done)
            problems += token_format.problems(path, self.headerless)
        if val and not train and not problems:
            problems.append(ALL_HELD_OUT)
        if problems:
            raise UserError(problems)
        about: dict[str, str | int] = {"kind": "token_files", "files": len(train) + len(val)}
        return Corpus(self._units(train), self._units(val), about)

    def read_ids(self, unit: Unit, vocab_size: int) -> Tokens:
        """Return the unit's ids, [n], in the dtype of the vocabulary. Raises UserError for an id outside of it."""
        return token_format.read(unit, self.headerless, vocab_size)

    def count(self, unit: Unit) -> int:
        """Return how many ids the unit has."""
        form = token_format.form_of(Path(unit.path), self.headerless)
        return token_format.count(unit, form.dtype)

    def _units(self, paths: list[Path]) -> list[Unit]:
        return [unit for path in paths for unit in token_format.units(path, self.headerless)]

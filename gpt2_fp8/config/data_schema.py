"""The keys of the group `data`: a class for each kind of source, and the mixture of several (see `schema`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpt2_fp8.config.keys import Part, Scored, Seed, Workers


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What every data set has."""

    name: str
    tokenizer: str  # gpt2, bytes, or the path of a tokenizer.json, of Llama 3's tokenizer.model, or of their folder
    num_workers: Workers  # processes that read and tokenise; 0: in the training process. Never changes the order
    seed: Seed  # of the order of the text; follows `seed` unless set
    val_sequences: Scored  # sequences of the validation split that are scored; 0: no validation


@dataclass(frozen=True, kw_only=True)
class TextData(DataConfig):
    """What every data set has that is tokenised."""

    cache_dir: str | None  # keep tokenised units here, and what a hub run needs to go on offline; null: keep nothing


@dataclass(frozen=True, kw_only=True)
class StdlibData(TextData):
    """The source of Python's standard library: real text that is on every machine."""

    kind: Literal["stdlib"]


@dataclass(frozen=True, kw_only=True)
class FilesData(TextData):
    """Local files: .txt (a document each), .jsonl and .jsonl.zst (a document a line), .parquet (a document a row)."""

    kind: Literal["files"]
    train_files: list[str]  # paths or globs
    val_files: list[str]  # paths or globs; empty: `val_fraction` of the training files is held out
    val_fraction: Part
    text_column: str


@dataclass(frozen=True, kw_only=True)
class HubData(TextData):
    """A data set of the Hugging Face hub, streamed."""

    kind: Literal["hub"]
    repo: str
    revision: str  # best a commit hash; a branch is resolved at the start, and a resume is held to that commit
    train_files: list[str]  # paths or globs inside the repository
    val_files: list[str]  # held out: never trained on, even where train_files matches them too
    text_column: str


@dataclass(frozen=True, kw_only=True)
class FileOrHubData(HubData):
    """A single local text file where it exists, else the hub (tinyshakespeare)."""

    kind: Literal["file_or_hub"]  # type: ignore[assignment]
    path: str
    val_fraction: Part  # of the local file; the hub has a split of its own


@dataclass(frozen=True, kw_only=True)
class RegisteredData(TextData):
    """A source of text that a module of one's own has registered (`plugins`)."""

    kind: Literal["registered"]
    source: str  # the name that it was registered under


@dataclass(frozen=True, kw_only=True)
class TokenFilesData(DataConfig):
    """Files of token ids (.bin): nanoGPT's, llm.c's and modded-nanogpt's. `tokenizer` says what the ids mean."""

    kind: Literal["token_files"]
    train_files: list[str]  # paths or globs
    val_files: list[str]  # paths or globs: a file is never split, since its ids do not tell where documents begin
    headerless: Literal["uint16", "uint32"]  # the ids of files without a header


Mixed = StdlibData | FilesData | HubData | FileOrHubData | TokenFilesData | RegisteredData  # a mixture has no mixture


@dataclass(frozen=True, kw_only=True)
class MixtureData:
    """Several sources. Each training sequence comes from one of them, in proportion to the weights."""

    name: str
    kind: Literal["mixture"]
    seed: Seed  # of the mixing; the order of each source follows its own
    weights: dict[str, float] | None  # by the sources' names, in any unit; null: all alike
    sources: dict[str, StdlibData | FilesData | HubData | FileOrHubData | TokenFilesData | RegisteredData]

    @property
    def tokenizer(self) -> str:
        """Return the sources' tokenizer, which is the same for all."""
        return next(source.tokenizer for source in self.sources.values())

    @property
    def num_workers(self) -> int:
        """Return the worker processes of all sources, which read for any of them."""
        return sum(source.num_workers for source in self.sources.values())

    @property
    def val_sequences(self) -> int:
        """Return how many sequences a validation scores at most, over all sources."""
        return sum(source.val_sequences for source in self.sources.values())


TextOfARun = Mixed | MixtureData

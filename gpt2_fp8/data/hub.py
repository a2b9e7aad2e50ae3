"""A data set of the Hugging Face hub, streamed. A unit is a parquet row group, or a whole file of another kind.

Parquet and JSON are read as local files are. Other kinds (.csv, .txt by lines, .arrow and more) are read by `datasets`.
The list of the hub's files is kept in `data.cache_dir`, with the tokens. A run whose units are all there needs no hub:
with HF_HUB_OFFLINE=1, or while the hub does not answer. With HF_HUB_OFFLINE=1 (or HF_DATASETS_OFFLINE=1) files are read
from the cache of the hub's client, as the same units.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from gpt2_fp8.config.errors import DataSourceLost, Problem, UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.config.text_files import kind_of
from gpt2_fp8.data import formats
from gpt2_fp8.data.formats import TextFile
from gpt2_fp8.data.reader import with_retries, write_whole
from gpt2_fp8.data.units import Corpus, DocumentCounts, Unit

_NO_FILES = ("DataFilesNotFoundError", "EmptyDatasetError")  # of `datasets`: it knows no file's kind

log = logging.getLogger(__name__)

WAITS = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0)  # seconds, in addition to the client's five tries of 1 to 8 s
TIMEOUT_SECONDS = 10.0  # without a byte before a request fails; the hub's client has waits without an end
HELD_OUT = 0.05  # of the documents of a data set that is one file without a split to validate on
BLOCK_BYTES = 10 << 20  # that a request asks for in addition to what is read now, but of parquet


@dataclass(frozen=True)
class Listing:
    """The commit of a revision, and for each split its files and their number of units."""

    commit: str
    files: dict[str, list[str]]
    shards: dict[str, int]


def _load_listing(path: Path | None) -> Listing | None:
    """Return what was stored; None if there is nothing, or it is damaged."""
    try:
        return Listing(**json.loads(path.read_bytes())) if path is not None and path.is_file() else None
    except (OSError, ValueError, TypeError) as error:
        log.warning("data: %s is damaged (%s) and is not used", path, type(error).__name__)
        return None


@dataclass
class HubSource:
    """Files of the data set `repo` at `revision`; `val_files` are taken out of `train_files`.

    Without `train_files` they are those of its own splits. If it has only one, the last file is held out, or of a
    single file some documents.

    `corpus()` resolves the revision to a commit, the globs to files, and the files to units. What the hub said of the
    files is pickled for the workers, which then ask it only for the text.
    """

    repo: str
    revision: str
    train_files: list[str]
    val_files: list[str]
    text_column: str
    cache_dir: Path | None = None  # where listings are kept
    waits: tuple[float, ...] = WAITS
    _listing: Listing | None = None
    _snapshot: Path | None = None  # of the client's cache, which is read instead of the hub
    _counts: dict[str, list[int]] = field(default_factory=dict, repr=False)  # the units of each file
    _hub: Any = field(default=None, repr=False)  # its file system, which remembers what it was told

    def corpus(self) -> Corpus:
        """Ask the hub which files there are. If it is out of reach, use its last answer, or raise DataSourceLost."""
        asked = [self.repo, self.revision, *self.train_files, "", *self.val_files, "", self.text_column]
        name = f"hub-{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]}.json"
        path = self.cache_dir and self.cache_dir / name
        known = _load_listing(path)
        if is_offline():
            self._snapshot = self._find_snapshot(known.commit if known else self.revision)
        if known is None or not is_offline():
            try:
                # Nothing is lost yet: the user learns of it without a run's long waits.
                known = with_retries(self._ask, f"the list of {self.repo}", self.waits[:3])[0]
                if path is not None:
                    with suppress(OSError):  # a later run without the hub then has none
                        write_whole(path, json.dumps(asdict(known)).encode())
            except DataSourceLost as error:
                if known is None:
                    raise
                log.warning("data: %s; going on with what %s was at %s", error, self.repo, known.commit)
        self._listing = known
        log.info("data: %s at %s, %d files", self.repo, known.commit, sum(map(len, known.files.values())))
        about: dict[str, str | int] = {"kind": "hub", "repo": self.repo, "commit": known.commit}
        return Corpus(self._units("train", known), self._units("val", known), about)

    def read(self, unit: Unit, counts: DocumentCounts) -> Iterator[object]:
        """Read the rows of a row group, or of a whole file, again from its start."""
        split, listing = unit.path, self._listing
        assert listing is not None, "corpus() comes first"
        paths = listing.files[split]
        with self._refusals():
            if split not in self._counts:  # the hub was out of reach at the start
                self._counts[split] = self._count(listing.commit, paths)
            starts = [*accumulate(self._counts[split], initial=0)]
            at = bisect_right(starts, unit.start) - 1
            group = unit.start - starts[at]
            file = self._file(listing.commit, paths[at])
            with formats.content_errors(file.name):
                if _is_read_here(file.name):
                    yield from formats.read_file(file, range(group, group + 1), self.text_column, counts)
                else:
                    yield from self._read_by_datasets(file, paths[at])

    def _ask(self) -> Listing:
        """Ask for what the hub holds now."""
        with self._refusals():
            commit, files = self._find_files()
            self._counts = {split: self._count(commit, paths) for split, paths in files.items()}
        return Listing(commit, files, {split: sum(counts) for split, counts in self._counts.items()})

    def _find_files(self) -> tuple[str, dict[str, list[str]]]:
        """Return the commit that the revision names, and the files of each split at that commit."""
        from huggingface_hub import HfApi

        if is_offline() and self._snapshot is None:
            raise UserError.of(
                f"data.repo={self.repo}: HF_HUB_OFFLINE is set, and the hub's cache has none at {self.revision}",
                "unset HF_HUB_OFFLINE; or train on local files: data=text_files",
            )
        commit = self._snapshot.name if self._snapshot else None
        commit = commit or HfApi().dataset_info(self.repo, revision=self.revision, timeout=TIMEOUT_SECONDS).sha
        assert commit
        problems: list[Problem] = []
        found: dict[str, list[str]] = {"train": [], "val": []}
        if not self.train_files:
            found = self._find_splits(commit, hold_out=not self.val_files)
        for split, patterns in (("train", self.train_files), ("val", self.val_files)):
            for pattern in patterns:
                names = self._match(commit, pattern)
                found[split] = [*dict.fromkeys([*found[split], *names])]
                if not names:
                    what = f"{self.repo} has no file {pattern} at revision {self.revision}"
                    problems.append(Problem(what, f"correct data.{split}_files; the names are on the data set's page"))
        held_out = set(found["val"])
        if not self._splits_documents(found):
            found["train"] = [path for path in found["train"] if path not in held_out]
        if not found["train"] and not problems:
            problems.append(Problem("data.val_files takes every file of data.train_files"))
        if problems:
            raise UserError(problems)
        return commit, found

    def _match(self, commit: str, pattern: str) -> list[str]:
        """Return the names of the files that `pattern` matches, sorted, but empty ones."""
        if self._snapshot:
            names = glob.glob(pattern, root_dir=self._snapshot, recursive=True)
            files = [name for name in names if (path := self._snapshot / name).is_file() and path.stat().st_size]
            return sorted(Path(name).as_posix() for name in files)
        root = f"datasets/{self.repo}@{commit}/"
        entries = self._connect().glob(root + pattern, detail=True)
        files = [path for path, entry in entries.items() if entry["type"] == "file" and entry["size"]]
        return sorted(path.removeprefix(root) for path in files)

    def _find_splits(self, commit: str, *, hold_out: bool) -> dict[str, list[str]]:
        """Return the files of the data set's own splits, as its card or the files' names have it."""
        import datasets

        where, root = self.repo, f"hf://datasets/{self.repo}@{commit}"
        if self._snapshot:
            where = root = str(self._snapshot)
        revision = None if self._snapshot else commit
        try:
            splits = datasets.load_dataset_builder(where, revision=revision).config.data_files or {}
        except ValueError as error:
            if "Config name is missing" not in str(error):
                raise
            names = " ".join(str(error).split("Example", 1)[0].split())
            remedy = "name the files of one: data.train_files='[NAME/train*]' data.val_files='[NAME/validation*]'"
            raise UserError.of(f"data.repo={self.repo}: {names}", remedy) from error
        files = {str(split): [str(path).removeprefix(f"{root}/") for path in paths] for split, paths in splits.items()}
        train = files.get("train") or next(iter(files.values()), [])
        val = files.get("validation") or files.get("test") or (train[-1:] if files.get("train") else [])
        return {"train": train, "val": val if hold_out else []}

    def _splits_documents(self, files: dict[str, list[str]]) -> bool:
        """Return whether a single file is for both sides, which then have documents of their own."""
        return (
            not self.train_files and not self.val_files and len(files["train"]) == 1 and files["train"] == files["val"]
        )

    def _find_snapshot(self, revision: str) -> Path | None:
        """Return the data set's folder in the cache of the hub's client; None if it has none."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        with suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(self.repo, repo_type="dataset", revision=revision, local_files_only=True))
        return None

    def _count(self, commit: str, paths: list[str]) -> list[int]:
        """Return the number of units of each file. Raises UserError if the first, or a parquet file, has no text."""
        found = []
        for path in paths:
            file, is_parquet = self._file(commit, path), kind_of(path) == ("parquet", "")
            with formats.content_errors(file.name):
                if _is_read_here(path) and (is_parquet or path is paths[0]):
                    formats.check_column(file, self.text_column)
                elif path is paths[0]:
                    next(self._read_by_datasets(file, path), None)
                found.append(formats.read_footer(file).num_row_groups if is_parquet else 1)
        return found

    def _read_by_datasets(self, file: TextFile, path: str) -> Iterator[object]:
        """Return the documents of a file. The text of a table's cells is not interpreted."""
        import datasets

        datasets.disable_progress_bars()
        table = re.search(r"\.[ct]sv\b", path, re.IGNORECASE)
        as_typed = {"converters": {self.text_column: str}, "keep_default_na": False} if table else {}
        where = str(self._snapshot) if self._snapshot else self.repo
        revision = None if self._snapshot else file.version
        opened = datasets.load_dataset(
            where, data_files=[path], split="train", revision=revision, streaming=True, **as_typed
        )
        for rows in opened.with_format("arrow").iter(batch_size=1024):
            formats.check_schema(rows.schema, file, self.text_column)
            yield from formats.as_documents(rows.column(self.text_column))

    def _connect(self) -> Any:
        from huggingface_hub import HfFileSystem

        bound_waits()
        self._hub = self._hub or HfFileSystem(skip_instance_cache=True)
        return self._hub

    def _file(self, commit: str, path: str) -> TextFile:
        """Return a file of the hub. Parquet is fetched in the ranges that are read, others in blocks."""
        if snapshot := self._snapshot:
            return TextFile(f"{self.repo}/{path}", commit, lambda: (snapshot / path).open("rb"))
        hub, where = self._connect(), f"datasets/{self.repo}@{commit}/{path}"
        by_range = {"cache_type": "none"} if kind_of(path) == ("parquet", "") else {"block_size": BLOCK_BYTES}

        def opened() -> Any:
            file = hub.open(where, "rb", **by_range)
            fetch = file.cache.fetcher

            def fetch_whole(start: int, end: int) -> bytes:
                content: bytes = fetch(start, end)
                if len(content) < min(end, file.size) - start:
                    raise ConnectionError(f"{len(content)} bytes came in place of {end - start}")
                return content

            file.cache.fetcher = fetch_whole
            return file

        return TextFile(f"{self.repo}/{path}", commit, opened)

    def _units(self, split: str, listing: Listing) -> list[Unit]:
        n, commit = listing.shards.get(split, 0), listing.commit
        parquet_alone = all(path.endswith(".parquet") for path in listing.files[split])
        version = commit if parquet_alone else f"{commit} text"  # once, the values of other files decided their type
        files = hashlib.sha256("\n".join(listing.files[split]).encode()).hexdigest()[:16]
        named = f"{self.repo}@{commit} {files} {self.text_column}"
        units = [Unit(f"{named} {i}/{n}", split, i, i + 1, version) for i in range(n)]
        if self._splits_documents(listing.files):
            side: Literal["train", "val"] = "val" if split == "val" else "train"
            return [replace(unit, side=side, val_fraction=HELD_OUT) for unit in units]
        return units

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Enter a context in which errors that no waiting can solve become a UserError."""
        try:
            yield
        except Exception as error:
            remedy = _find_remedy(error)
            if remedy is None:
                raise
            message = printable(" ".join(str(error).split()))[:300]
            raise UserError.of(f"the hub refuses {self.repo} at {self.revision}: {message}", remedy) from error


def _is_read_here(path: str) -> bool:
    """Return whether a file is read as a local one is, and not by `datasets`."""
    kind = kind_of(path)
    return kind is not None and kind[0] in ("parquet", "jsonl", "json")


def _find_remedy(error: BaseException) -> str | None:
    """Return what the user can do about an error of the hub's client; None if it may pass by itself."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RevisionNotFoundError

    if isinstance(error, OfflineModeIsEnabled) or (isinstance(error, ConnectionError) and is_offline()):
        return "unset HF_HUB_OFFLINE; or train on local files: data=text_files"
    if type(error).__name__ in _NO_FILES or "Dataset scripts are no longer supported" in str(error):
        return "take its parquet files, which most have under data.revision=refs/convert/parquet"
    if isinstance(error, RevisionNotFoundError):
        return "set data.revision to a commit, branch or tag that the data set has"
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
        return "check data.repo; if access has to be requested, accept the terms on its page and set HF_TOKEN"
    cause = error.__cause__ or error.__context__
    return _find_remedy(cause) if cause is not None else None


def is_offline() -> bool:
    """Return whether the user has asked for no network."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode() or os.environ.get("HF_DATASETS_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


@cache
def bound_waits() -> None:
    """Have the client's waits end: each one that it makes is as its first, with its hooks."""
    from huggingface_hub import get_session, set_client_factory

    kind, hooks = type(get_session()), get_session().event_hooks
    set_client_factory(lambda: kind(event_hooks=hooks, follow_redirects=True, timeout=TIMEOUT_SECONDS))

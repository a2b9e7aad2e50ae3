"""A data set of the Hugging Face hub, streamed through `datasets`. A unit is a parquet row group, or another file.

The list of the hub's files is kept in `data.cache_dir`, with the tokens. A run whose units are all there needs no hub:
with HF_HUB_OFFLINE=1, or while the hub does not answer.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gpt2_fp8.config.errors import DataSourceLost, Problem, UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data import hub_client
from gpt2_fp8.data.hub_client import import_datasets
from gpt2_fp8.data.hub_listing import Listing
from gpt2_fp8.data.parquet import as_documents
from gpt2_fp8.data.retry import HUB_WAITS, with_retries
from gpt2_fp8.data.units import Corpus, DocumentCounts, Unit

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass
class HubSource:
    """Files of the data set `repo` at `revision`; `val_files` are taken out of `train_files`.

    `corpus()` resolves the revision to a commit, the globs to files, and the files to units. It keeps the resulting
    `datasets` objects. They are pickled for the workers, which then ask the hub only for the text.
    """

    repo: str
    revision: str
    train_files: list[str]
    val_files: list[str]
    text_column: str
    waits: tuple[float, ...] = HUB_WAITS
    cache_dir: Path | None = None  # where listings are kept
    _listing: Listing | None = None
    _splits: dict[str, Any] = field(default_factory=dict, repr=False)

    def corpus(self) -> Corpus:
        """Ask the hub which files there are. If it is out of reach, use its last answer.

        Raises:
            UserError: the hub knows no such data set, revision, file or column, or does not let this user read it.
            DataSourceLost: the hub does not answer.
        """
        asked = [self.repo, self.revision, *self.train_files, "", *self.val_files, "", self.text_column]
        known = Listing.load(self.cache_dir, asked)
        if known is None or not _is_offline():
            try:
                known = self._ask()
                known.store(self.cache_dir, asked)
            except DataSourceLost as error:
                if known is None:
                    raise
                log.warning("data: %s; going on with what %s was at %s", error, self.repo, known.commit)
        self._listing = known
        log.info("data: %s at %s, %d files", self.repo, known.commit, sum(map(len, known.files.values())))
        about: dict[str, str | int] = {"kind": "hub", "repo": self.repo, "commit": known.commit}
        return Corpus(self._units("train", known), self._units("val", known), about)

    def read(self, unit: Unit, counts: DocumentCounts) -> Iterator[object]:
        """Read the rows of one shard again from its start."""
        import_datasets()  # in a worker, before an unpickled data set is used
        split, listing = unit.path, self._listing
        assert listing is not None, "corpus() comes first"
        if split not in self._splits:  # the hub was out of reach at the start
            self._splits[split] = self._guarded(lambda: self._open(listing.commit, listing.files[split]))
        shards = self._splits[split]
        tables = shards.shard(shards.num_shards, unit.start).with_format("arrow").iter(batch_size=1024)
        while (table := self._guarded(lambda: next(tables, None))) is not None:
            if self.text_column not in table.column_names:
                raise self._no_column(split, table.column_names)
            yield from as_documents(table.column(self.text_column))

    def is_current(self, unit: Unit) -> bool:
        """Return True: a commit's files do not change."""
        return True

    def _ask(self) -> Listing:
        """Ask for what the hub holds now."""
        first = self.waits[:4]  # nothing is lost yet, so the user learns soon, without the long waits of a run
        what = f"the list of {self.repo}"
        (commit, files), _ = with_retries(lambda: self._guarded(self._files), what, first, first_contact=True)
        for split, paths in files.items():
            if paths:
                self._splits[split], _ = with_retries(
                    lambda p=paths: self._guarded(lambda: self._open(commit, p)),  # type: ignore[misc]
                    f"the {split} files of {self.repo}",
                    first,
                )
        return Listing(commit, files, {split: opened.num_shards for split, opened in self._splits.items()})

    def _files(self) -> tuple[str, dict[str, list[str]]]:
        """Return the commit that the revision names, and the files of each split at that commit."""
        from huggingface_hub import HfApi, HfFileSystem

        import_datasets()
        commit = HfApi().dataset_info(self.repo, revision=self.revision, timeout=hub_client.TIMEOUT_SECONDS).sha
        assert commit
        root, fs = f"datasets/{self.repo}@{commit}/", HfFileSystem()
        problems: list[Problem] = []
        empty = 0
        found: dict[str, list[str]] = {"train": [], "val": []}
        for split, patterns in (("train", self.train_files), ("val", self.val_files)):
            for pattern in patterns:
                entries: Any = fs.glob(root + pattern, detail=True)
                matches = sorted(path for path, entry in entries.items() if entry["type"] == "file" and entry["size"])
                empty += sum(entry["type"] == "file" for entry in entries.values()) - len(matches)
                names = [path.removeprefix(root) for path in matches]
                found[split] = [*dict.fromkeys([*found[split], *names])]
                if not matches:
                    what = f"{self.repo} has no file {pattern} at revision {self.revision}"
                    problems.append(Problem(what, f"correct data.{split}_files; the names are on the data set's page"))
        if problems:
            raise UserError(problems)
        if empty:
            log.warning("data: %d files of %s are empty and are skipped", empty, self.repo)
        held_out = set(found["val"])
        found["train"] = [path for path in found["train"] if path not in held_out]
        if not found["train"]:
            raise UserError.of("data.val_files takes every file of data.train_files", "leave some to train on")
        return commit, found

    def _open(self, commit: str, paths: list[str]) -> Any:
        """Open the files as a streaming data set of one shard a unit."""
        datasets = import_datasets()
        only_text = {"columns": [self.text_column]} if all(path.endswith(".parquet") for path in paths) else {}
        datasets.disable_progress_bars()
        opened = datasets.load_dataset(
            self.repo, data_files=paths, split="train", revision=commit, streaming=True, **only_text
        )
        if opened.features is not None and self.text_column not in opened.features:
            raise self._no_column(paths[0], list(opened.features))
        return opened.reshard()

    def _units(self, split: str, listing: Listing) -> list[Unit]:
        n, commit = listing.shards.get(split, 0), listing.commit
        files = hashlib.sha256("\n".join(listing.files[split]).encode()).hexdigest()[:16]
        return [
            Unit(f"{self.repo}@{commit} {files} {self.text_column} {i}/{n}", split, i, i + 1, version=commit)
            for i in range(n)
        ]

    def _no_column(self, where: str, columns: list[str]) -> UserError:
        have = f"one of {printable(', '.join(columns))[:300]}" if columns else "the name of its text column"
        return UserError.of(
            f"{self.repo} has no column {self.text_column!r} in {printable(where)}", f"set data.text_column to {have}"
        )

    def _guarded(self, action: Callable[[], Result]) -> Result:
        """Return `action()`. Errors that no waiting can solve become a UserError."""
        try:
            return action()
        except Exception as error:
            remedy = _remedy(error)
            if remedy is None:
                raise
            message = printable(" ".join(str(error).split()))[:300]
            raise UserError.of(f"the hub refuses {self.repo} at {self.revision}: {message}", remedy) from error


def _is_offline() -> bool:
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def _remedy(error: BaseException) -> str | None:
    """Return what the user can do about an error of the hub's client; None if it may pass by itself."""
    import_datasets()
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RevisionNotFoundError

    if isinstance(error, OfflineModeIsEnabled) or (isinstance(error, ConnectionError) and _is_offline()):
        return (
            "unset HF_HUB_OFFLINE; or train on local files: data=text_files. What a run with data.cache_dir=FOLDER has "
            "read once, the same run reads there"
        )
    if isinstance(error, RevisionNotFoundError):
        return "set data.revision to a commit, branch or tag that the data set has"
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
        return (
            "check data.repo; if access has to be requested, accept the terms on its page and set HF_TOKEN to a "
            "token of that account"
        )
    if isinstance(error, DatasetNotFoundError | DataFilesNotFoundError):
        return "check data.repo, data.revision and data.train_files against the data set's page"
    if isinstance(error, RuntimeError) and "scripts are no longer supported" in str(error):
        return "use a revision with plain files, which most have under data.revision=refs/convert/parquet"
    cause = error.__cause__ or error.__context__
    return _remedy(cause) if cause is not None else None

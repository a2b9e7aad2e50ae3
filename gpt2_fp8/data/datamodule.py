"""The Lightning data module and its loaders: one item of training is one rank's share of one optimizer step.

What was trained on is told by `advance`, and only that is saved: batches that Lightning or pinned memory hold ahead of
the step are simply made again after a resume. The state does not depend on the number of ranks or workers.

Loaders are sized and iterable. Sized: Lightning fetches one item ahead of an unsized loader to know which item is the
last, and a checkpoint would then be one item ahead. Iterable: Lightning then does not distribute the items over the
ranks a second time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gpt2_fp8.config.data_schema import TextOfARun
from gpt2_fp8.config.errors import DataSourceLost, Problem, RunError, UserError
from gpt2_fp8.config.run_length import last_step
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.data.lane import Batches, Cursor
from gpt2_fp8.data.progress import label
from gpt2_fp8.data.token_stream import TokenStream
from gpt2_fp8.data.tokenizer import Tokenizer, Tokens, load_tokenizer
from gpt2_fp8.data.units import DocumentCounts
from gpt2_fp8.runtime.collectives import rank_and_world

log = logging.getLogger(__name__)

PADDING = -1  # the id of every token of a row that only fills up a validation batch; the loss ignores its targets


class Steps(IterableDataset[dict[str, Any]]):
    """The remaining steps of a run. `len` is of the whole run, since Lightning continues its count after a resume.

    `start` returns the number of steps done, and the batches from there on: with `overfit_batches` the very first ones.
    """

    def __init__(self, start: Callable[[], tuple[int, Batches]], max_steps: int, overfit_batches: int):
        self.start, self.max_steps, self.overfit_batches = start, max_steps, overfit_batches
        self.wait_seconds = 0.0  # spent in here, while training waits

    def __len__(self) -> int:
        return self.max_steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        before = time.perf_counter()
        step, batches = self.start()
        assert step < self.max_steps, "nothing is left to train on"  # Lightning would ask again without end
        try:
            kept = [torch.from_numpy(batches.next()) for _ in range(self.overfit_batches)]
            while step < self.max_steps:
                ids = kept[step % len(kept)] if kept else torch.from_numpy(batches.next())
                step += 1
                cursor: Cursor = {"step": step, "lanes": {} if kept else batches.state(), "units": batches.begun()}
                self.wait_seconds += time.perf_counter() - before
                yield {"ids": ids, "cursor": cursor}
                before = time.perf_counter()
        except RunError as error:  # otherwise the exit would wait for workers in the midst of their own retries
            batches.close()
            if isinstance(error, DataSourceLost):
                error.lead = "\nwhen it answers again: "
            raise


class Validation(IterableDataset[dict[str, Any]]):
    """One rank's rows of the validation sequences of each source, and then of each set. An item is of one of them.

    Every rank has the same number of items, all of one shape: rows of `PADDING` take the place of missing sequences.
    `sets`, the texts of `data.validation`, do not change what the items before them are.
    """

    def __init__(self, sources: dict[str, Tokens], micro_batch_size: int, sets: dict[str, Tokens]):
        self.named = "" not in sources or bool(sets)
        rank, world = rank_and_world()
        most = max(math.ceil(len(blocks) / world) for blocks in sources.values())  # of a rank, of one source
        self.rows = min(micro_batch_size, most)
        self.ids: list[Tensor] = []  # of each source and set, int32 [items * rows, n_positions + 1]
        for blocks in (*sources.values(), *sets.values()):
            mine = torch.from_numpy(blocks[rank::world].astype("int32"))
            missing = math.ceil(len(blocks) / (world * self.rows)) * self.rows - len(mine)
            self.ids.append(torch.nn.functional.pad(mine, (0, 0, 0, missing), value=PADDING))

    def __len__(self) -> int:
        return sum(len(ids) for ids in self.ids) // self.rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for source, rows in enumerate(self.ids):
            for ids in rows.split(self.rows):
                yield {"ids": ids, "source": source} if self.named else {"ids": ids}


class TokenDataModule(LightningDataModule):
    """Batches of token ids from the text that `config`, a `data` group, names.

    Args:
        micro_batch_size: sequences per rank and item of the validation loader; the training loader does not use it.
        max_steps: optimizer steps of the whole run, and so the training loader's length.
        n_positions, global_batch_size, overfit_batches, plugins: as of `TokenStream`.

    Attributes:
        text: what batches are cut from, and how far it was used; None before `setup`.
    """

    def __init__(
        self,
        config: TextOfARun,
        *,
        n_positions: int,
        global_batch_size: int,
        micro_batch_size: int,
        max_steps: int,
        overfit_batches: int = 0,
        plugins: tuple[str, ...] = (),
    ):
        super().__init__()
        self.config = config
        self.n_positions = n_positions
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.max_steps, self.overfit_batches = max_steps, overfit_batches
        self.plugins = plugins
        self._steps = Steps(lambda: self._found.batches(bool(overfit_batches)), max_steps, overfit_batches)
        self._loaded: dict[str, Any] | None = None  # a saved state that came before `setup`
        self.text: TokenStream | None = None

    @classmethod
    def from_config(cls, config: RunConfig) -> TokenDataModule:
        """Build the data module of a run whose micro-batch is a number."""
        plugins = tuple(config.plugins)
        return cls(config.data, micro_batch_size=config.micro_batch, plugins=plugins, **_arguments(config))

    def is_of(self, config: RunConfig) -> bool:
        """Tell whether its training batches are those that `config` asks for."""
        return self.config == config.data and all(
            getattr(self, name) == value for name, value in _arguments(config).items()
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded on first use. Raises UserError where GPT-2's vocabulary, or a file, cannot be had."""
        return load_tokenizer(self.config.tokenizer)

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer has, end of text included."""
        return self.tokenizer.n_vocab

    @property
    def wait_seconds(self) -> float:
        """How long training has waited for its batches so far, in all."""
        return self._steps.wait_seconds

    def setup(self, stage: str | None = None) -> None:
        """Find the text, and read its validation sequences. Raises what `TokenStream` and `load_state_dict` do."""
        if self.text is not None:
            return
        self.text = TokenStream(
            self.config, self.tokenizer, self.n_positions, self.global_batch_size, self.overfit_batches,
            plugins=self.plugins,
        )  # fmt: skip
        if self._loaded is not None:
            self.load_state_dict(self._loaded)

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Items {"ids": int32 [global_batch_size // ranks, n_positions + 1], "cursor": Cursor}, one a step."""
        return DataLoader(self._steps, batch_size=None, num_workers=0, pin_memory=torch.cuda.is_available())

    def val_dataloader(self) -> DataLoader[dict[str, Any]] | list[Any]:
        """Items {"ids": int32 [rows, n_positions + 1]}, rows <= micro_batch_size: the same on every call.

        Those of a mixture, and with `data.validation`, have a "source" too: its place among `val_sources` (the only
        source is 0) and, after these, `val_sets`. [] if data.val_sequences is 0.
        """
        if not self._found.val:
            return []
        rows = Validation(self._found.val, self.micro_batch_size, self._found.sets)
        # A loader draws a number from its generator for every pass, and a validation that a signal ends is repeated.
        return DataLoader(
            rows, batch_size=None, num_workers=0, pin_memory=torch.cuda.is_available(), generator=torch.Generator("cpu")
        )

    test_dataloader = predict_dataloader = val_dataloader  # the held-out text

    @property
    def val_sources(self) -> list[str]:
        """The sources of a mixture that are validated, by name; empty if the text has one source."""
        return [name for name in self.text.val if name] if self.text is not None else []

    @property
    def val_sets(self) -> list[str]:
        """The texts of `data.validation`, by name, which are scored by themselves."""
        return list(self.text.sets) if self.text is not None else []

    def source_metrics(self) -> dict[str, float]:
        """Return `tokens/NAME` and `epochs/NAME` of each source of a mixture, as far as training has come."""
        used = {} if self.text is None else self.text.tokens_used()
        return {
            f"{metric}/{name}": value
            for name, values in used.items()
            for metric, value in zip(("tokens", "epochs"), values, strict=True)
        }

    def begin(self, step: int) -> None:
        """Begin a `fit` that has finished `step` steps; 0: a new run. Raises UserError if the text stands elsewhere."""
        progress = self._found.progress
        if step == 0 and progress.step:
            progress.begin()
            self._steps.wait_seconds = 0.0
        if step != progress.step:
            cause = f"training stands at step {step}, and its TokenDataModule at step {progress.step}"
            raise UserError.of(cause, "give fit the checkpoint (ckpt_path=FOLDER), or a new TokenDataModule")

    def advance(self, cursor: Cursor) -> None:
        """Note that the step whose item had this cursor was trained on: a resume starts after it."""
        self._found.progress.advance(cursor)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, in ints, strings and dicts. Called on every rank at once: their lanes are gathered."""
        return {} if self.text is None else self.text.progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` stands; may be called before `setup` or after it. Raises as `Progress.restore`."""
        if self.text is not None:
            self.text.restore(state_dict)
        self._loaded = state_dict if self.text is None else None

    def other_settings(self, state_dict: dict[str, Any]) -> list[Problem]:
        """Everything in which a saved state is of another text, or of another order of it; after `setup`."""
        return list(self._found.progress.find_differences(state_dict))

    def identity(self) -> dict[str, str]:
        """Return what tells the text and its order from others, by name; empty before `setup`."""
        return {} if self.text is None else label(self.text.progress.fingerprint)

    def report(self) -> dict[str, Any]:
        """For `summary.json`: the source, the documents that training has come to, and this rank's reading."""
        return {} if self.text is None else self.text.report() | {"wait_seconds": round(self.wait_seconds, 3)}

    def say_documents(self) -> None:
        """Log what was skipped or mended, if anything was."""
        counts = DocumentCounts() if self.text is None else self.text.progress.documents()
        if odd := counts.describe_odd():
            log.info("data: of %d documents: %s", counts.read, odd)

    def teardown(self, stage: str | None = None) -> None:
        """End the worker processes. The state stays: another `fit` starts them again."""
        if self.text is not None:
            self.text.pool.close()

    @property
    def _found(self) -> TokenStream:
        assert self.text is not None, "setup() comes first"
        return self.text


def _arguments(config: RunConfig) -> dict[str, int]:
    """Return what decides a run's training batches besides its text, by `TokenDataModule`'s own names."""
    return {
        "n_positions": config.model.n_positions,
        "global_batch_size": config.global_batch_size,
        "max_steps": last_step(config),
        "overfit_batches": config.trainer.overfit_batches,
    }

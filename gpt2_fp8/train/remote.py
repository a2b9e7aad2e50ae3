"""A logger of a service, which may be slow or away. Training never waits for it, and never ends by it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.engine.histograms import TensorStats

log = logging.getLogger(__name__)

MOST_WAITING = 10_000  # rows, while the service does not answer
END_SECONDS = 60.0  # seconds that the end of a run waits for what is not sent yet


class Service(Protocol):
    """What a service must offer. Any method may raise anything, and all run in one thread.

    Attributes: `title`, for people; `undelivered`, what to do about rows that did not arrive.
    """

    title: str
    undelivered: str

    def begin(self) -> Logger:
        """Open the run there, or continue it, and return Lightning's logger of it."""

    def histograms(self, logger: Logger, tensors: list[TensorStats], step: int) -> None:
        """Send the distributions of tensors."""

    def text(self, logger: Logger, tag: str, text: str, step: int) -> None:
        """Send a text."""

    def end(self, logger: Logger, status: str) -> None:
        """Close the run there, so that another one may begin in this process."""


class Remote(Logger):
    """Hands each row to a thread, which gives it to Lightning's logger of the service.

    The first failure of several in a row logs a warning, and rows of a service that does not answer are lost.
    """

    knows_config = True  # `service.begin` sends the whole configuration

    def __init__(self, service: Service):
        super().__init__()
        self._service = service
        self._rows: queue.Queue[Callable[[], object] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._logger: Logger | None = None
        self._failing = self._full = False

    @property
    def name(self) -> str:
        """Return the service's name."""
        return self._service.title

    @property
    def version(self) -> str:
        """Return nothing: the run's own name there is known to the service alone."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send a row. Its numbers are read now, since a tensor may change."""
        row = {name: float(value) for name, value in metrics.items()}
        self._put(lambda: self._inner().log_metrics(row, step))

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Send hyper-parameters of a callback; the configuration is there already."""
        values = dict(params or {})
        self._put(lambda: self._inner().log_hyperparams(values))

    @rank_zero_only
    def log_histograms(self, tensors: Iterable[TensorStats], step: int) -> None:
        """Send the distributions of tensors, if the service shows them."""
        self._put(partial(self._send, self._service.histograms, list(tensors), step))

    @rank_zero_only
    def log_text(self, tag: str, text: str, step: int) -> None:
        """Send a text."""
        self._put(partial(self._send, self._service.text, tag, text, step))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Send what is left, close the run there, and wait for both, for `END_SECONDS` at most."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        try:
            self._rows.put(lambda: self._end(status), timeout=END_SECONDS)
            self._rows.put(None, timeout=END_SECONDS)
            thread.join(END_SECONDS)
        except queue.Full:
            pass
        if thread.is_alive():
            log.warning("%s has not got everything: it does not answer; %s", self.name, self._service.undelivered)

    def _put(self, row: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"log-{self.name}", daemon=True)
            self._thread.start()
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            if not self._full:
                log.warning("%s does not answer: rows are lost, training goes on", self.name)
            self._full = True

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            try:
                row()
                self._failing = False
            except Exception as error:
                if not self._failing:
                    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                    log.warning("%s does not take a row, training goes on: %.200s", self.name, reason)
                self._failing = True

    def _inner(self) -> Logger:
        if self._logger is None:
            self._logger = self._service.begin()
        return self._logger

    def _send(self, method: Callable[..., object], *arguments: Any) -> None:
        method(self._inner(), *arguments)

    def _end(self, status: str) -> None:
        if self._logger is not None:
            logger, self._logger = self._logger, None
            self._service.end(logger, status)

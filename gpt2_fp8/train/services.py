"""W&B and MLflow through Lightning's loggers, each in a thread: training never waits for a service, nor ends by it."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config import disk
from gpt2_fp8.config.schema import RunConfig

log = logging.getLogger(__name__)

FILE = "remote_runs.json"  # in the run's folder: its identifier at each service
MOST_WAITING = 10_000  # rows, while the service does not answer
END_SECONDS = 60.0  # that the end of a run waits for what is not sent yet
_WRITING = threading.Lock()  # each service has a thread
_LOCAL = "sqlite:///mlflow.db"  # in the folder where the command was typed, as MLflow's own server has it
_TALKATIVE = ("mlflow", "alembic", "lightning.pytorch.loggers.mlflow")  # about tables and experiments made


def read_run_id(folder: Path, service: str) -> str | None:
    """Return the identifier of the run at a service; None if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(disk.read_json(folder / FILE)[service])
    return None


class Remote(Logger):
    """Hands each row to a thread, which gives it to Lightning's logger of the service.

    The first failure of several in a row logs a warning, and rows of a service that does not answer are lost. A
    subclass opens and closes the run and sends texts, in the thread, and may raise anything there.

    Attributes: `name`, the service's name; `key`, its name in `remote_runs.json`; `undelivered`, what to do about rows
    that did not arrive; `run_id`, the run's identifier there, None for a new one; `group`, its sweep.
    """

    name = key = undelivered = ""
    version = ""  # the run's own name there is known to the service alone

    def __init__(self, config: RunConfig, folder: Path, in_sweep: bool, resumed: bool) -> None:
        super().__init__()
        self.config, self.folder = config, folder
        self.group = folder.parent.name if in_sweep else None
        self.run_name = f"{self.group}/{folder.name}" if in_sweep else config.run_name
        self.run_id = read_run_id(folder, self.key) if resumed else None
        self._calls: queue.Queue[Callable[[Any], object] | str] = queue.Queue(MOST_WAITING)  # a text: how the run ended
        self._thread: threading.Thread | None = None
        self._full = False

    def begin(self) -> Logger:
        """Open the run there, or continue it, and return Lightning's logger of it."""
        raise NotImplementedError

    def end(self, logger: Any, status: str) -> None:
        """Close the run there, so that another one may begin in this process."""
        logger.finalize(status)

    def send_text(self, logger: Any, tag: str, text: str, step: int) -> None:
        """Send a text."""
        raise NotImplementedError

    def note_run_id(self, run_id: str) -> None:
        """Note the identifier of a run that was begun. An error costs a warning: else each row would begin another."""
        self.run_id, path = run_id, self.folder / FILE
        try:
            with _WRITING:
                durable.write_json(path, (disk.read_json(path) if path.exists() else {}) | {self.key: run_id})
        except (OSError, ValueError) as error:
            log.warning("%s: a resume will begin another run, since this one's identifier cannot be noted: %s",
                        self.name, error)  # fmt: skip

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send a row. Its numbers are read now, since a tensor may change."""
        row = {name: float(value) for name, value in metrics.items()}
        self._send(lambda logger: logger.log_metrics(row, step))

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Send hyper-parameters of a callback; the configuration is there already."""
        values = dict(params or {})
        self._send(lambda logger: logger.log_hyperparams(values))

    @rank_zero_only
    def log_text(self, tag: str, text: str, step: int) -> None:
        """Send a text."""
        self._send(partial(self.send_text, tag=tag, text=text, step=step))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Send what is left, close the run there, and wait for both, for `END_SECONDS` at most."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        with suppress(queue.Full):
            self._calls.put(status, timeout=END_SECONDS)
            thread.join(END_SECONDS)
        if thread.is_alive():
            log.warning("%s has not got everything: it does not answer; %s", self.name, self.undelivered)

    def _send(self, call: Callable[[Any], object]) -> None:
        """Have the thread call `call` with Lightning's logger."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"log-{self.name}", daemon=True)
            self._thread.start()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            if not self._full:
                log.warning("%s does not answer: rows are lost, training goes on", self.name)
            self._full = True

    def _work(self) -> None:
        logger, failing, ended = None, False, False
        while not ended:
            call = self._calls.get()
            ended = isinstance(call, str)
            try:
                if not isinstance(call, str):
                    logger = logger or self.begin()
                    call(logger)
                elif logger is not None:
                    self.end(logger, call)
                failing = False
            except Exception as error:
                if not failing:
                    log.warning("%s does not take a row, training goes on: %.200s", self.name, error)
                failing = True


class Wandb(Remote):
    """A run at Weights & Biases. If W&B cannot be reached at the start, the run is kept on disk for `wandb sync`."""

    name, key, undelivered = "W&B", "wandb", "`wandb sync` of its folder wandb sends the rest"

    def begin(self) -> Logger:
        """Open the run, or continue it; offline if that fails."""
        import wandb

        options = self.config.logger.wandb
        assert options is not None
        open_run = partial(  # by ourselves: Lightning's logger would take over a run that the process has begun
            wandb.init, name=self.run_name, dir=self.folder,
            id=self.run_id, resume="allow",  # None: that of its sweep's agent, or a new one
            project=options.project, entity=options.entity, group=options.group or self.group,
            notes=self.config.notes, tags=[f"{key}={value}"[:64] for key, value in self.config.tags.items()],
            config=asdict(self.config), allow_val_change=True,
            reinit="create_new",  # each job of a sweep is a run of its own, also if one before did not end
            settings=wandb.Settings(console="off", silent=True),  # the log and the bar are ours
        )  # fmt: skip
        try:
            run: Any = open_run(mode=options.mode)
        except Exception as error:
            if options.mode == "offline":
                raise
            log.warning("W&B cannot be reached, so the run is kept for `wandb sync` (%.200s); `wandb login`, or "
                        "logger.wandb.mode=offline, ends this warning", " ".join(str(error).split()))  # fmt: skip
            run = open_run(mode="offline")
        run.define_metric("trainer/global_step")  # the step's name in Lightning's rows
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        self.note_run_id(run.id)
        log.info("W&B: %s", f"wandb sync {run.dir.removesuffix('/files')}" if run.offline else run.url)
        return WandbLogger(experiment=run)

    def send_text(self, logger: Any, tag: str, text: str, step: int) -> None:
        """Send a text, as a table of one row."""
        logger.log_text(tag, columns=["step", "text"], data=[[step, text]], step=step)

    def end(self, logger: Any, status: str) -> None:
        """Close the run."""
        logger.experiment.finish(exit_code=0 if status == "success" else 1)


class MLflow(Remote):
    """A run in MLflow's store or on its server."""

    name, key, undelivered = "MLflow", "mlflow", "metrics.csv has every row"

    def begin(self) -> Logger:
        """Open the run, or continue it. The parameters of a run are those it began with: MLflow changes none."""
        import mlflow  # noqa: F401 - it sets the levels of its loggers when it is imported

        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        options = self.config.logger.mlflow
        assert options is not None
        own = {f"tags.{key}": str(value) for key, value in self.config.tags.items()}
        own |= {"mlflow.note.content": self.config.notes} if self.config.notes else {}
        own |= {"sweep": self.group} if self.group else {}
        uri = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or _LOCAL
        logger = MLFlowLogger(options.experiment, self.run_name, uri, own, run_id=self.run_id)
        if self.run_id is not None:
            logger.experiment.set_terminated(self.run_id, "RUNNING")
            return logger
        self.note_run_id(str(logger.run_id))
        logger.log_hyperparams(asdict(self.config))
        log.info("MLflow: run %s of the experiment %s in %s", self.run_id, options.experiment, uri)
        if not uri.startswith("http"):
            log.info("MLflow: to look at it, pip install mlflow && mlflow ui --backend-store-uri %s", uri)
        return logger

    def send_text(self, logger: Any, tag: str, text: str, step: int) -> None:
        """Send a text, as a file among the run's artifacts."""
        logger.experiment.log_text(logger.run_id, text, f"{tag}/step-{step:08d}.txt")

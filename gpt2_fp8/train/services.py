"""W&B and MLflow, through Lightning's loggers: which run there is this one, and what it is told."""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config import disk
from gpt2_fp8.config.schema import MLflowConfig, RunConfig, WandbConfig
from gpt2_fp8.engine.histograms import TensorStats

FILE = "remote_runs.json"
_WRITING = threading.Lock()  # each service has a thread
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def remembered(folder: Path, service: str) -> str | None:
    """Return the identifier of the run at a service; None if there is none, or it is not one."""
    return _read(folder).get(service)


def remember(folder: Path, service: str, name: str) -> None:
    """Note an identifier. Raises OSError."""
    with _WRITING:
        durable.write_json(folder / FILE, _read(folder) | {service: name})


def fresh(environment: Mapping[str, str] = os.environ) -> str:
    """Return an identifier for a new run at W&B: that of its sweep's agent, or eight characters drawn at random.

    They are drawn by the operating system: the run's own random numbers stay as they are.
    """
    given = environment.get("WANDB_RUN_ID", "")
    return given if _ID.fullmatch(given) else secrets.token_hex(4)


def _read(folder: Path) -> dict[str, str]:
    with suppress(OSError, ValueError, RecursionError):
        found = disk.read_json(folder / FILE)
        if isinstance(found, dict):
            return {str(key): value for key, value in found.items() if isinstance(value, str) and _ID.fullmatch(value)}
    return {}


log = logging.getLogger(__name__)

_LOCAL = "sqlite:///mlflow.db"  # in the folder where the command was typed, as MLflow's own server has it
_TALKATIVE = ("mlflow", "alembic", "lightning.pytorch.loggers.mlflow")  # about tables and experiments made
_STEP = "trainer/global_step"  # the name of the step in Lightning's rows
_GROUPS = {"gradient": "gradients", "weight": "weights"}


@dataclass(frozen=True)
class Identity:
    """What names a run at a service: its name, and the sweep that it is a job of."""

    name: str
    group: str | None = None

    @classmethod
    def of(cls, config: RunConfig, folder: Path, in_sweep: bool) -> Identity:
        """Return that of a run in `folder`. A job of a sweep is named after both: the sweep and its own number."""
        if in_sweep:
            return cls(f"{folder.parent.name}/{folder.name}", folder.parent.name)
        return cls(config.run_name)


class Wandb:
    """A run at Weights & Biases. If W&B cannot be reached at the start, the run is kept on disk for `wandb sync`."""

    title = "W&B"

    def __init__(self, options: WandbConfig, config: RunConfig, folder: Path, identity: Identity, resumed: bool):
        self.undelivered = f"`wandb sync {folder}/wandb/*run-*` sends the rest"
        self._options, self._config, self._folder, self._identity = options, config, folder, identity
        self._id = (remembered(folder, "wandb") if resumed else None) or fresh()

    def begin(self) -> Logger:
        """Open the run, or continue it; offline if that fails."""
        remember(self._folder, "wandb", self._id)
        try:
            logger = self._open(self._options.mode)
        except Exception as error:
            if self._options.mode == "offline":
                raise
            log.warning("W&B cannot be reached, so the run is kept for `wandb sync` (%.200s); `wandb login`, or "
                        "logger.wandb.mode=offline, ends this warning", " ".join(str(error).split()))  # fmt: skip
            logger = self._open("offline")
        run: Any = logger.experiment
        log.info("W&B: %s", f"wandb sync {run.dir.removesuffix('/files')}" if run.offline else run.url)
        return logger

    def _open(self, mode: str | None) -> WandbLogger:
        import wandb

        more: dict[str, Any] = {} if mode is None else {"mode": mode}
        run = wandb.init(
            name=self._identity.name,
            project=self._options.project,
            entity=self._options.entity,
            group=self._options.group or self._identity.group,
            dir=self._folder,
            id=self._id,
            resume="allow",
            reinit="create_new",  # each job of a sweep is a run of its own, also if one before did not end
            notes=self._config.notes,
            tags=[f"{key}={value}"[:64] for key, value in self._config.tags.items()],
            config=asdict(self._config),
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True),  # the log and the bar are ours
            **more,
        )
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP, step_sync=True)
        return WandbLogger(experiment=run)

    def histograms(self, logger: Any, tensors: list[TensorStats], step: int) -> None:
        """Send the distributions of tensors, and of gradients the norms."""
        import wandb

        row: dict[str, Any] = {}
        for tensor in tensors:
            bins = np.array(tensor.counts), np.array(tensor.edges)
            row[f"{_GROUPS[tensor.kind]}/{tensor.name}"] = wandb.Histogram(np_histogram=bins)
        row |= {f"grad_norm/{tensor.name}": tensor.norm for tensor in tensors if tensor.kind == "gradient"}
        logger.log_metrics(row, step)

    def text(self, logger: Any, tag: str, text: str, step: int) -> None:
        """Send a text, as a table of one row."""
        logger.log_text(tag, columns=["step", "text"], data=[[step, text]], step=step)

    def end(self, logger: Any, status: str) -> None:
        """Close the run."""
        logger.experiment.finish(exit_code=0 if status == "success" else 1)


class MLflow:
    """A run in MLflow's store or on its server."""

    title = "MLflow"
    undelivered = "metrics.csv has every row"

    def __init__(self, options: MLflowConfig, config: RunConfig, folder: Path, identity: Identity, resumed: bool):
        self._options, self._config, self._folder, self._identity = options, config, folder, identity
        self._uri = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or _LOCAL
        self._id = remembered(folder, "mlflow") if resumed else None

    def begin(self) -> Logger:
        """Open the run, or continue it. The parameters of a run are those it began with: MLflow changes none."""
        import mlflow  # noqa: F401 - it sets the levels of its loggers when it is imported

        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        own = {f"tags.{key}": str(value) for key, value in self._config.tags.items()}
        own |= {"mlflow.note.content": self._config.notes} if self._config.notes else {}
        own |= {"sweep": self._identity.group} if self._identity.group else {}
        logger = MLFlowLogger(
            experiment_name=self._options.experiment,
            run_name=self._identity.name,
            tracking_uri=self._uri,
            tags=own,
            run_id=self._id,
        )
        if self._id is None:
            self._id = logger.run_id
            assert self._id is not None
            remember(self._folder, "mlflow", self._id)
            logger.log_hyperparams(asdict(self._config))
            log.info("MLflow: run %s of the experiment %s in %s", self._id, self._options.experiment, self._uri)
        else:
            logger.experiment.set_terminated(self._id, "RUNNING")
        return logger

    def histograms(self, logger: Any, tensors: list[TensorStats], step: int) -> None:
        """Send the norms of gradients: MLflow has no histograms."""
        norms = {f"grad_norm/{tensor.name}": tensor.norm for tensor in tensors if tensor.kind == "gradient"}
        logger.log_metrics(norms, step)

    def text(self, logger: Any, tag: str, text: str, step: int) -> None:
        """Send a text, as a file among the run's artifacts."""
        logger.experiment.log_text(logger.run_id, text, f"{tag}/step-{step:08d}.txt")

    def end(self, logger: Any, status: str) -> None:
        """Close the run."""
        logger.finalize(status)

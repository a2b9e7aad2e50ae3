"""What is wrong with the loggers that were chosen: libraries that are missing, names that a service refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import finding
from gpt2_fp8.config.schema import RunConfig

_NOT_IN_A_PROJECT = re.compile(r"[/\\#?%:]")  # W&B's own rule
_LONGEST_PROJECT = 128  # likewise
_STORES = ("http://", "https://", "sqlite:///", "file:", "postgresql", "mysql", "mssql", "databricks")
_SQL = ("sqlite", "postgresql", "mysql", "mssql")


def check(config: RunConfig) -> Iterator[Finding]:
    """Find what is wrong with `logger`. Libraries are looked for, not imported."""
    logger = config.logger
    if logger.histograms_every_n_steps and not (logger.tensorboard or logger.wandb):
        reason = "only TensorBoard and W&B show histograms"
        yield finding(config, "logger.histograms_every_n_steps", reason, "leave it out, or logger=default")
    if logger.wandb is not None:
        yield from _missing("wandb", ["wandb"])
        yield from _project(config, logger.wandb.project)
        for key in ("logger.wandb.entity", "logger.wandb.group"):
            if getattr(logger.wandb, key.rpartition(".")[2]) == "":
                yield finding(config, key, "is empty", f"leave {key} out, or give it a value")
    if logger.mlflow is not None:
        uri = logger.mlflow.tracking_uri
        yield from _missing("mlflow", ["mlflow", *(["sqlalchemy"] if uri is None or uri.startswith(_SQL) else [])])
        if not logger.mlflow.experiment.strip():
            yield finding(config, "logger.mlflow.experiment", "is empty", "logger.mlflow.experiment=NAME")
        if uri is not None and not uri.startswith(_STORES):
            remedy = "logger.mlflow.tracking_uri=http://HOST:5000, or sqlite:///FILE"
            yield finding(config, "logger.mlflow.tracking_uri", "is no address that MLflow knows", remedy)


def _missing(name: str, libraries: list[str]) -> Iterator[Finding]:
    if absent := [library for library in libraries if find_spec(library) is None]:
        cause = f"logger={name}: the library {absent[0]}, which it needs, is not installed"
        yield Finding((f"logger.{name}",), Problem(cause, f'pip install -e ".[{name}]"'))


def _project(config: RunConfig, project: str) -> Iterator[Finding]:
    key = "logger.wandb.project"
    if not project.strip() or len(project) > _LONGEST_PROJECT:
        reason = f"W&B's names of projects have 1 to {_LONGEST_PROJECT} characters"
        yield finding(config, key, reason, f"{key}=gpt2-fp8")
    elif _NOT_IN_A_PROJECT.search(project):
        remedy = f"{key}={_NOT_IN_A_PROJECT.sub('-', project)}; an account or team is logger.wandb.entity=NAME"
        yield finding(config, key, "W&B refuses / \\ # ? % : in names of projects", remedy)

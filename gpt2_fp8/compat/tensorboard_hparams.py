"""TensorBoard's table of runs (HPARAMS): its summaries without TensorFlow, which its public module wants.

Holds for `tensorboard>=2.20`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def write(writer: Any, values: Mapping[str, Any], results: Iterable[tuple[str, str]], trial: str) -> None:
    """Write a run's row of the table: its hyper-parameters, and which curves' last points are its results.

    Args:
        writer: torch's SummaryWriter, of the folder above the curves' own.
        values: bool, int, float or str, by name.
        results: tags, each with the folder of its curve below the writer's.
        trial: tells runs apart that have the same values.
    """
    from tensorboard.plugins.hparams import summary_v2

    columns = [summary_v2.HParam(name) for name in values]
    metrics = [summary_v2.Metric(tag, group=group, display_name=f"{group}: {tag}") for tag, group in results]
    file = writer._get_file_writer()
    file.add_summary(summary_v2.hparams_config_pb(columns, metrics))
    file.add_summary(summary_v2.hparams_pb(dict(values), trial_id=trial))

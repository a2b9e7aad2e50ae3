"""TensorBoard's private parts: what is written is what its own reader reads."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from torch.utils.tensorboard import SummaryWriter

from gpt2_fp8.compat import tensorboard_hparams


def test_write_gives_a_row_of_the_table_with_its_values_and_results(tmp_path):
    values = {"optim.lr": 1e-3, "seed": 3, "precision": "bf16", "compile": True}
    with SummaryWriter(str(tmp_path)) as writer:
        tensorboard_hparams.write(writer, values, [("loss", "val")], "0")
    found = EventAccumulator(str(tmp_path)).Reload()
    content = found.summary_metadata[metadata.SESSION_START_INFO_TAG].plugin_data.content
    started = metadata.parse_session_start_info_plugin_data(content).hparams
    shown = {name: getattr(started[name], started[name].WhichOneof("kind")) for name in started}
    assert shown == {"optim.lr": 1e-3, "seed": 3.0, "precision": "bf16", "compile": True}
    content = found.summary_metadata[metadata.EXPERIMENT_TAG].plugin_data.content
    (result,) = metadata.parse_experiment_plugin_data(content).metric_infos
    assert (result.name.tag, result.name.group) == ("loss", "val")

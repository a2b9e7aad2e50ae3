"""What the bar says; how it is drawn is in `tests/test_terminals.py`."""

from types import SimpleNamespace

from gpt2_fp8.callbacks.progress import ProgressBar


def test_what_stands_beside_the_bar():
    bar = ProgressBar(19_073, lambda step: (19_073 - step) / 2 if step else None)
    assert bar.text() == "0/19,073"
    bar.on_train_batch_end(SimpleNamespace(global_step=1200))
    bar.read(1200, {"train_loss": 3.45214, "tokens_per_second": 845_012.4})
    bar.on_validation_end(None, SimpleNamespace(val_loss=3.5))
    assert bar.text() == "1,200/19,073  left 2 h 29 min  loss 3.4521  val_loss 3.5000  845,012 tok/s"

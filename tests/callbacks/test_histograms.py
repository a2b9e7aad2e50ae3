"""Histograms under a run: an error in counting costs the histograms, and not the run."""

import pytest

from gpt2_fp8.callbacks import histograms
from tests.runs import recorded

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("calls", [0, 1])
def test_an_error_in_counting_does_not_end_a_run(tmp_path, monkeypatch, caplog, calls):
    """Of gradients, the first that are counted, or of weights. The losses are those of a run without histograms."""
    off, _ = recorded(tmp_path / "off", "logger.histograms_every_n_steps=0")
    count, made = histograms.count, []

    def fail(tensors):
        made.append(len(tensors))
        if len(made) > calls:
            raise ValueError("of a library")
        return count(tensors)

    monkeypatch.setattr(histograms, "count", fail)
    on, _ = recorded(tmp_path / "on", "logger=default", "logger.histograms_every_n_steps=2")
    assert on == off
    assert len(made) == calls + 1, "it is not tried again"
    said = [message for message in caplog.messages if "no histograms from step" in message]
    assert said == ["no histograms from step 1 on (ValueError: of a library); training goes on"]

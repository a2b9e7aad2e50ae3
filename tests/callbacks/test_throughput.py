"""The training log's interval: in which order the host comes to its parts."""

from gpt2_fp8.callbacks.throughput import Throughput
from gpt2_fp8.engine.step import StepResult
from tests.runs import metrics, train


def test_the_driver_is_asked_before_the_host_waits_for_the_step(tmp_path, monkeypatch):
    """A driver's answer takes milliseconds. While the device still computes the step, they cost nothing."""
    read_of = []  # results whose verdict was read
    asked = {}  # how many of them, when the driver was asked at a step
    read = StepResult.read

    def recorded(self):
        if not any(self is result for result in read_of):
            read_of.append(self)
        return read(self)

    def of_driver(self, trainer):
        asked[trainer.global_step] = len(read_of)
        return {"gpu_utilization": 0.5}

    monkeypatch.setattr(StepResult, "read", recorded)
    monkeypatch.setattr(Throughput, "_of_driver", of_driver)
    train(tmp_path, "trainer.log_every_n_steps=3", "callbacks.checkpoint_every_n_steps=0")
    assert asked == {1: 0, 3: 2, 6: 5, 9: 8, 12: 11}
    assert metrics(tmp_path)["gpu_utilization"] == dict.fromkeys(asked, 0.5)

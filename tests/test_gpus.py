"""Each process of pytest-xdist has a GPU, in turn."""

import pytest

from tests import gpus


@pytest.mark.parametrize(
    ("worker", "visible", "count", "gpu"),
    [
        ("gw0", None, 4, "0"),
        ("gw5", None, 4, "1"),
        ("gw19", None, 1, "0"),
        ("gw1", "2,3", 2, "3"),
        ("gw3", "GPU-8518bb92,GPU-82c2dad7", 2, "GPU-82c2dad7"),
        ("", None, 4, None),
        ("gw0", None, 0, None),
        ("gw0", "", 0, None),
    ],
)
def test_a_gpu_for_each_process(worker, visible, count, gpu):
    assert gpus.of_worker(worker, visible, count) == gpu

from pathlib import Path

import pytest

from gpt2_fp8.config.shown import as_typed, duration

TIMES = {
    -1.0: "0.0 s", 0.44: "0.4 s", 9.9: "9.9 s", 9.96: "10 s", 59.4: "59 s", 59.6: "1 min 0 s", 83: "1 min 23 s",
    3599.6: "1 h 0 min", 9060: "2 h 31 min", 86_369: "23 h 59 min", 86_399: "1 d 0 h", 273_600: "3 d 4 h",
    1e9: "11,574 d 2 h",
}  # fmt: skip


@pytest.mark.parametrize("seconds", TIMES)
def test_a_time_in_its_two_largest_units(seconds):
    assert duration(seconds) == TIMES[seconds]


def test_a_path_as_one_would_type_it(tmp_path):
    assert as_typed(tmp_path / "outputs/a", tmp_path) == Path("outputs/a")
    assert as_typed(Path("/elsewhere/a"), tmp_path) == Path("/elsewhere/a")

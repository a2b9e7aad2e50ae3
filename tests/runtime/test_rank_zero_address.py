"""What MASTER_ADDR may be, and what was meant by what it may not be."""

import pytest

from gpt2_fp8.runtime.rank_zero_address import check, first_of, is_one

HOSTS = ["gpu01", "gpu_01.cluster", "node01.", "10.0.0.1", "::1", "fe80::1%eth0", "vm", "1und1.de", "x" * 63]
TYPED = {  # {what was typed: what was meant; None: nobody can say}
    "gpu01:29500": "MASTER_ADDR=gpu01 MASTER_PORT=29500",
    "[::1]:29500": "MASTER_ADDR=::1 MASTER_PORT=29500",
    "[::1]": "MASTER_ADDR=::1",
    "http://gpu01": "MASTER_ADDR=gpu01",
    "tcp://10.0.0.1:29500/": "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
    " gpu01 ": "MASTER_ADDR=gpu01",
    "me@gpu01": "MASTER_ADDR=gpu01",
    "gpu01:": "MASTER_ADDR=gpu01",
    "gpu[01-04]": "MASTER_ADDR=gpu01",
    "gpu01,gpu02": "MASTER_ADDR=gpu01",
    "gpu01:99999": "MASTER_ADDR=gpu01",
    "gpu 01": None,
    "10.0.0.256": None,
    "29500": None,
    "a..b": None,
    "-x": None,
    "$(hostname)": None,
    ":29500": None,
    "[::1": None,
    "gpü": None,
    "x" * 300: None,
}


@pytest.mark.parametrize("address", HOSTS)
def test_a_host(address):
    assert check(address) is None


@pytest.mark.parametrize("typed", TYPED)
def test_what_is_none_leads_to_what_was_meant(typed):
    """And what is advised is not refused."""
    problem, meant = check(typed), TYPED[typed]
    assert problem is not None
    assert problem.cause.startswith("MASTER_ADDR=")
    if meant is None:
        assert problem.remedy.startswith("the name or address of rank 0's host")
        return
    assert problem.remedy == f"{meant}, the same for every process"
    assert is_one(meant.split()[0].partition("=")[2])
    assert ("has a port in it" in problem.cause) == ("MASTER_PORT" in meant)


def test_the_first_of_a_list_of_slurms():
    assert first_of("r[1-2]n[5-6],gpu[07-08]") == "r1n5"

"""Processes that meet in a store, started by variables alone: who comes, who does not, and who is of another run."""

import os
import re
import socket
import subprocess
import sys
import time

import pytest

from tests import forkserver
from tests.ports import free_port

pytestmark = pytest.mark.whole

JOIN = """
import os, sys, time
from gpt2_fp8.config.errors import RunError
from gpt2_fp8.runtime import launcher, meeting, meeting_place, patience, roll_call

patience.NOTICE_SECONDS, patience.PATIENCE_SECONDS = 0.5, 2.0 if "short" in sys.argv else 30.0
roll_call.STRANGER_SECONDS = 4.0 if "this" in sys.argv else 1.0
roll_call.GRACE_SECONDS, meeting_place.ANSWER_SECONDS, meeting_place.NAME_SECONDS = 1.0, 1.0, 1.0
meeting_place.AGENT_SECONDS = 1.0
try:
    met = meeting.join(launcher.current())
    if "leave" in sys.argv and met.launcher.rank:
        met.leave(RunError("the roof fell in"))
        sys.exit("left")
    print("met", met.exchange("topic", met.launcher.rank))
    met.exchange("end", "")
    met.say("")  # rank 0 has the store
    met.has_said("", 2)
except RunError as error:
    print(f"{type(error).__name__} {error.exit_code}: {error}")
# Rank 0 has the store, and one that comes late is to find it.
open(f"over-{os.getpid()}", "w").close()
until = time.monotonic() + 30
while "stay" in sys.argv and sum("over-" in name for name in os.listdir()) < int(sys.argv[1]):
    assert time.monotonic() < until
    time.sleep(0.05)
"""


@pytest.fixture
def port():
    return free_port()


def join(tmp_path, port, *processes, words=(), address="127.0.0.1", late=0.0):
    """What each process prints that joins. A process is its rank, or its variables; WORD is a word of its own.

    With the word `stay` none ends before all are through. The last one is `late` by so many seconds.
    """
    (tmp_path / "join.py").write_text(JOIN)
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    started = []
    for number, process in enumerate(processes, 1):
        time.sleep(late if number == len(processes) else 0.0)
        own = process if isinstance(process, dict) else {"RANK": str(process)}
        word = [own["WORD"]] if "WORD" in own else []
        started.append(
            forkserver.Popen(
                [sys.executable, "join.py", str(len(processes)), *words, *word], cwd=tmp_path, text=True,
                env=os.environ | common | {name: value for name, value in own.items() if name != "WORD"},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    return [process.communicate(timeout=60)[0] for process in started]


def step(rank, number):
    """A task of one of two steps of a job, at the port that somebody has exported for both."""
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(number), "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank), "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_ranks_meet(tmp_path, port, address):
    assert join(tmp_path, port, 1, 0, address=address) == ["met [0, 1]\n"] * 2


def test_who_does_not_come_is_said_before_it_is_given_up(tmp_path, port):
    (said,) = join(tmp_path, port, {"RANK": "0", "WORLD_SIZE": "3"}, words=["short"])
    assert "] waiting for rank 1, rank 2\n" in said
    assert re.search("NotMet 1: waited [0-9]+ s in vain for rank 1, rank 2", said)


def test_rank_0_that_does_not_come(tmp_path, port):
    (said,) = join(tmp_path, port, 1, words=["short"])
    assert f"] waiting for rank 0 at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT): Connection refused" in said
    assert re.search("NotMet 1: waited [0-9]+ s in vain", said)


def test_an_agent_that_has_ended(tmp_path, port):
    """Its variables were left in a shell. An agent listens before it starts a process, so it is not waited for long."""
    left = {"RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    (said,) = join(tmp_path, port, left)
    assert said.startswith(f"NotMet 2: error: torchrun's agent does not answer at 127.0.0.1:{port} ")
    assert "unset TORCHELASTIC_RUN_ID RANK WORLD_SIZE LOCAL_RANK" in said


def test_a_host_that_nobody_knows(tmp_path, port):
    said = join(tmp_path, port, 0, 1, address="gpu01.invalid")
    assert [text.splitlines()[0].partition(":")[0] for text in said] == ["NotMet 2"] * 2
    assert all("error: gpu01.invalid (MASTER_ADDR) is no host that is known here" in text for text in said)


def test_a_port_where_something_else_listens(tmp_path):
    """torch's client waits there for ever."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        first, second = join(tmp_path, other.getsockname()[1], 0, 1)
    assert first.startswith("NotMet 2: error: rank 0 cannot listen at port")
    assert "fix: MASTER_PORT=NUMBER" in first
    assert "NotMet 2: error: what listens at" in second


@pytest.mark.parametrize("late", [0.0, 3.0])
def test_two_steps_of_a_job_at_one_port(tmp_path, port, late):
    """Of the two runs one is whole, whichever begins to listen first, and nobody joins the other's."""
    said = join(tmp_path, port, step(0, 0), step(1, 0), step(0, 1), step(1, 1), words=["stay"], late=late)
    whole, other = (said[:2], said[2:]) if "met" in said[0] else (said[2:], said[:2])
    assert whole == ["met [0, 1]\n"] * 2
    assert other[0].startswith("NotMet 2: error: rank 0 cannot listen at port")
    assert "fix: MASTER_PORT=NUMBER" in other[0]
    assert "2 processes by srun in step 7." in other[1]


def test_two_runs_by_variables_at_one_port(tmp_path, port):
    """Rank 1 of the other run is there before this run's own."""
    both = [{"RANK": rank, "WORD": word} for word, rank in (("other", "1"), ("this", "0"), ("this", "1"))]
    other, *this = join(tmp_path, port, *both, words=["stay"])
    assert this == ["met [0, 1]\n"] * 2
    assert "are complete, with another rank 1" in other
    assert "another MASTER_PORT for another run" in other


def test_a_rank_with_another_command_line_comes_too(tmp_path, port):
    """What differs, the run says."""
    said = join(tmp_path, port, 0, {"RANK": "1", "WORD": "another"})
    assert [text.splitlines()[-1] for text in said] == ["met [0, 1]"] * 2


def test_a_rank_that_is_there_twice(tmp_path, port):
    first, *ones = join(tmp_path, port, *({"RANK": rank, "WORLD_SIZE": "3"} for rank in "011"))
    assert first.splitlines()[-2].startswith("SharedRefusal 2: error: rank 1 on ")
    assert sorted(text.startswith("NotMet 2: error: two processes say that they are rank 1") for text in ones)[1]


def test_a_rank_that_counts_otherwise(tmp_path, port):
    first, second = join(tmp_path, port, 0, {"RANK": "1", "WORLD_SIZE": "3"})
    cause = "2 processes by RANK and WORLD_SIZE meet at"
    assert second.startswith(f"NotMet 2: error: {cause}")
    assert first.splitlines()[-2].startswith("SharedRefusal 2: error: rank 1 on ")
    assert cause in first


def test_a_rank_that_ends_before_the_others_have_heard_of_it(tmp_path, port):
    first, _ = join(tmp_path, port, 0, 1, words=["leave"])
    assert first.startswith("NotMet 1: rank 1 on ")
    assert first.endswith(" has ended: the roof fell in\n")

"""A run whose processes something else than Lightning has started: torchrun, accelerate, srun, or variables.

One launch a launcher. What is compared with a single process is compared as for Lightning's own launcher in
`test_ddp.py`. srun itself is run by `.ci/extras`; here are the variables that it sets.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from tests import forkserver
from tests.ports import free_port
from tests.runs import SMALL, checkpoint, metrics, summary, train_until
from tests.train.test_ddp import (
    ALONE,
    BATCH,
    IN_THE_FOLDER,
    SCRIPT,
    assert_equal_but_for_rounding,
    finish,
    run,
    the_run,
)

WORDS = [*SMALL[1:], *BATCH, "trainer.accelerator=cpu"]  # no key says how many processes there are
# Rank 1 is killed in the step after `step`, once. The count of restarts is each agent's own.
KILL = """
import os, signal

def training_step(self, batch, batch_idx):
    if self.global_rank == 1 and self.global_step == {step} and not os.path.exists("killed"):
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, batch, batch_idx)

GPT2Module.training_step = training_step
"""
# Rank 1 types other words: rank 0 waits a moment for one that does not.
OTHER_WORDS = """
import os
from gpt2_fp8.runtime import roll_call
roll_call.STRANGER_SECONDS = 0.5
"""
OTHER_RATE = f"""
{OTHER_WORDS}
sys.argv += ["optim.lr=1e-4"] * (os.environ["RANK"] == "1")
"""
OTHER_VERSION = """
import os
from gpt2_fp8.train import summary
versions = summary.versions
summary.versions = lambda: versions() | ({"numpy": "1.0"} if os.environ["RANK"] == "1" else {"numpy": "2.0"})
"""
OTHER_TEXT = (
    OTHER_WORDS
    + """
sys.argv += [f"data.train_files=[text-{os.environ['RANK']}.txt]"]
"""
)
NO_TEXT = """
import os
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.datamodule import TokenDataModule
setup = TokenDataModule.setup
def refuse(self, stage=None):
    if os.environ["RANK"] == "1":
        raise UserError.of("the text is not on this node", "copy it there")
    setup(self, stage)
TokenDataModule.setup = refuse
"""

forked_with_ranks = partial(forkserver.Popen, ranks=True)


def patched(tmp_path, patch):
    (tmp_path / "patched.py").write_text(SCRIPT.format(patch=patch))
    return "patched.py"


def start(cwd, *words, popen=forkserver.Popen, **environment):
    return popen(
        [sys.executable, *words],
        cwd=cwd, env=os.environ | ALONE | environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def agent(cwd, options, *words, patch=""):
    """torchrun, in a process that has torch already, and so have its ranks."""
    program = [*options, patched(cwd, patch)]
    return start(cwd, "-m", "torch.distributed.run", *program, *words, popen=forked_with_ranks)


def ranks(cwd, variables, *words, patch="", count=2):
    """Every rank's exit code and output, started by nothing but `variables(rank)`."""
    program = patched(cwd, patch)
    processes = [start(cwd, program, *words, **variables(rank)) for rank in range(count)]
    return [finish(process) for process in processes]


def by_hand(count=2):
    port = str(free_port())
    return lambda rank: {
        "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }  # fmt: skip


def srun(count=2):
    port = str(free_port())
    return lambda rank: {
        "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_NTASKS": str(count), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": str(count), "SLURM_STEP_NODELIST": "127.0.0.1",
        "MASTER_PORT": port,
    }  # fmt: skip


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The run of two processes by Lightning's own launcher, where a container sets variables for one process.

    The shell has others of a run on several nodes.
    """
    cwd = tmp_path_factory.mktemp("own")
    words = [*WORDS, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "run_name=run"]
    container = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    of_nodes = {"MASTER_ADDR": "gpu01:29500", "MASTER_PORT": "port", "NODE_RANK": "1"}
    code, output = run(cwd, *words, environment=ALONE | container | of_nodes)
    assert code == 0, output
    assert "launcher   Lightning: 2 processes" in output
    return cwd / "outputs/run"


def assert_same_numbers(folder, other):
    """Losses and norms to the last digit that is written."""
    table, others = metrics(folder), metrics(other)
    for column in ("train_loss", "val_loss", "grad_norm", "lr", "tokens"):
        assert table[column] == others[column], column


def test_torchrun_needs_no_key(tmp_path, own):
    code, output = finish(agent(tmp_path, ["--nproc-per-node", "2"], *WORDS, "trainer=auto", "trainer.accelerator=cpu"))
    assert code == 0, output
    folder = the_run(tmp_path)
    assert set(os.listdir(folder)) - {"rank_1.log"} == IN_THE_FOLDER
    assert "launcher   torchrun: 2 processes\n" in output
    assert "Warning" not in output
    assert output.count("precision  fp32 instead of") == 1
    assert_same_numbers(folder, own)


def test_what_the_agent_starts_again_continues_in_the_same_folder(tmp_path, one):
    """Without a name, and without ckpt_path: the agent gives the same command again."""
    patch = KILL.format(step=7)
    code, output = finish(agent(tmp_path, ["--nproc-per-node", "2", "--max-restarts", "1"], *WORDS, patch=patch))
    assert code == 0, output
    assert "launcher   torchrun: 2 processes, started again\n" in output
    assert output.count("/checkpoints/step-00000005 (step 5)") == 1
    assert_equal_but_for_rounding(the_run(tmp_path), one)


def test_what_was_refused_is_refused_again_where_the_agent_starts_it_again(tmp_path):
    """The folder is another run's: it is not continued because an agent has counted a failure."""
    train_until(4, tmp_path / "outputs/run", *BATCH)
    saved = sorted(path.name for path in (tmp_path / "outputs/run/checkpoints").iterdir())
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    code, output = finish(agent(tmp_path, options, *WORDS, "run_name=run"))
    assert code == 1, output
    assert output.count("error: outputs/run already holds a run, saved up to step-00000004") == 2, output
    assert sorted(path.name for path in (tmp_path / "outputs/run/checkpoints").iterdir()) == saved


def test_two_nodes_are_two_agents(tmp_path, own):
    """A rank of the second is killed: both agents start theirs again."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two"]
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", *place]
    both = [agent(tmp_path, options, *WORDS, "run_name=run", patch=KILL.format(step=7)) for _ in range(2)]
    ends = [finish(process, 150) for process in both]
    assert [code for code, _ in ends] == [0, 0], ends
    said = "".join(output for _, output in ends)
    assert re.search(r"launcher   torchrun: 2 processes on 2 nodes, started again", said), said
    assert_equal_but_for_rounding(tmp_path / "outputs/run", own)


# The only process waits in the step after 5 for the signal that its agent sends when another joins.
WAIT_FOR_ANOTHER = """
import os
from gpt2_fp8.runtime import signals

def training_step(self, batch, batch_idx):
    if os.environ["WORLD_SIZE"] == "1" and self.global_step == 5:
        Path("alone").touch()
        while signals.received() is None:
            time.sleep(0.1)
    original(self, batch, batch_idx)

GPT2Module.training_step = training_step
"""
# Rank 1 and its agent are killed together in the step after 7, as when a machine is lost.
LEAVE = """
import os, signal

def training_step(self, batch, batch_idx):
    if self.global_rank == 1 and self.global_step == 7:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, batch, batch_idx)

GPT2Module.training_step = training_step
"""
FITTED = [*(word for word in WORDS if not word.startswith("micro_batch_size=")), "run_name=run"]


def elastic(cwd, port, first, patch):
    """An agent of one process in a task of srun, of a run that one or two agents make; the first can be left last."""
    conf = f"is_host={int(first)},last_call_timeout=4,keep_alive_interval=1"
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "few", "--rdzv-conf", conf]
    program = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", *place, patched(cwd, patch)]
    command = ["-m", "torch.distributed.run", *program, *FITTED]
    task = srun()(int(not first)) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return start(cwd, *command, popen=forked_with_ranks, **task)


def test_a_node_joins(tmp_path, one):
    """The agent ends the running process by SIGTERM, which saves; both then go on as two, without `ckpt_path`."""
    port = free_port()
    first = elastic(tmp_path, port, True, WAIT_FOR_ANOTHER)
    until = time.monotonic() + 60
    while not (tmp_path / "alone").exists():
        assert first.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    second = elastic(tmp_path, port, False, WAIT_FOR_ANOTHER)
    ends = [finish(process) for process in (first, second)]
    assert [code for code, _ in ends] == [0, 0], ends
    said = "".join(output for _, output in ends)
    assert said.count("launcher   torchrun: 1 process\n") == 1
    assert said.count("launcher   torchrun: 2 processes on 2 nodes\n") == 1
    assert said.count("/checkpoints/step-00000005 (step 5)") == 1
    assert said.index("micro-batch 8 instead of 16") < said.index("micro-batch 4 instead of 16")
    assert_equal_but_for_rounding(tmp_path / "outputs/run", one)


def test_a_node_leaves(tmp_path, one):
    """What is left goes on from the last checkpoint as a single process."""
    port = free_port()
    first, second = (elastic(tmp_path, port, is_first, LEAVE) for is_first in (True, False))
    code, said = finish(first)
    assert finish(second)[0] == -signal.SIGKILL
    assert code == 0, said
    assert said.count("rank 1 is gone") == 1
    assert said.index("launcher   torchrun: 2 processes on 2 nodes") < said.index(
        "torchrun: 1 process, started again\n"
    )
    assert said.count("/checkpoints/step-00000005 (step 5)") == 1
    assert_equal_but_for_rounding(tmp_path / "outputs/run", one)


def test_four_tasks_of_srun_continue_what_one_process_has_begun(tmp_path, one):
    train_until(4, tmp_path / "outputs/run", *BATCH)
    ends = ranks(tmp_path, srun(4), *WORDS, "run_name=run", "ckpt_path=last", count=4)
    assert [code for code, _ in ends] == [0] * 4, ends
    assert "launcher   srun: 4 processes\n" in ends[0][1]
    assert [output for _, output in ends[1:]] == [""] * 3
    assert_equal_but_for_rounding(tmp_path / "outputs/run", one)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_is_torchrun_by_another_name(tmp_path, own):
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    options.append(f"--main_process_port={free_port()}")
    program = [*options, patched(tmp_path, ""), *WORDS, "run_name=run"]
    process = start(tmp_path, "-m", "accelerate.commands.launch", *program, popen=forked_with_ranks)
    code, output = finish(process)
    assert code == 0, output
    assert "launcher   accelerate launch: 2 processes\n" in output
    assert_same_numbers(tmp_path / "outputs/run", own)


# ---- what no rank can mend ----------------------------------------------------------------------------------------


def refused(ends, cause):
    """All ranks have refused, and one of them has said why, once."""
    assert [code for code, _ in ends] == [2] * len(ends), ends
    said = "".join(output for _, output in ends)
    assert said.count("error:") == said.count("fix:") == 1, said
    assert re.search(cause, said), said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("patch", "cause"),
    [
        (OTHER_RATE, "rank 1 has other settings than rank 0: optim.lr 0.0001 instead of"),
        (OTHER_VERSION, "rank 1 has other versions than rank 0: numpy 1.0 instead of 2.0"),
        (NO_TEXT, "the text is not on this node"),
    ],
)
def test_ranks_that_differ_are_refused_together(tmp_path, patch, cause):
    refused(ranks(tmp_path, by_hand(), *WORDS, "run_name=run", patch=patch), cause)


def test_ranks_with_other_texts_are_refused_together(tmp_path):
    for rank in range(2):
        (tmp_path / f"text-{rank}.txt").write_text("one line of text\n" * (3000 + rank))
    words = [*WORDS, "run_name=run", "data=text_files", "data.tokenizer=bytes"]
    said = refused(ranks(tmp_path, by_hand(), *words, patch=OTHER_TEXT), "rank 1 has other text than rank 0")
    assert "the training text (its checksum)" in said


def test_a_step_that_three_processes_cannot_share(tmp_path):
    refused(ranks(tmp_path, by_hand(3), *SMALL[1:], "run_name=run", count=3), "a step of 8 sequences does not divide")
    assert not (tmp_path / "outputs").exists()


def test_nodes_with_different_numbers_of_processes(tmp_path):
    """Each rank counts other processes than the others, so what else it finds wrong is not said."""
    variables = by_hand()
    ends = ranks(
        tmp_path, lambda rank: variables(rank) | {"LOCAL_WORLD_SIZE": str(2 - rank), "LOCAL_RANK": "0"}, *WORDS
    )
    said = refused(ends, r"RANK and WORLD_SIZE has started 2 processes, 2 on \S+ and 1 on \S+ \(rank 1\)")
    assert "fix: LOCAL_WORLD_SIZE=N, the same number on every node" in said


def test_a_package_that_a_node_lacks_is_said_by_its_first_process(tmp_path):
    """As where the environment was not activated. It was a traceback of each process, with exit code 1."""
    patch = 'sys.modules["hydra"] = None'
    said = refused(ranks(tmp_path, by_hand(), *WORDS, patch=patch), r"error: \S+ has no package hydra\n")
    assert "fix: activate the environment in which gpt2_fp8 is installed, on every node; or " in said


def test_what_one_rank_alone_refuses_is_said_of_it(tmp_path):
    patch = f"{OTHER_WORDS}\nsys.argv += ['optim.lr=fast'] * (os.environ['RANK'] == '1')\n"
    refused(ranks(tmp_path, by_hand(), *WORDS, "run_name=run", patch=patch), r"error: rank 1 on \S+: optim.lr")


def test_no_place_to_meet(tmp_path):
    variables = by_hand()
    ends = ranks(tmp_path, lambda rank: variables(rank) | {"MASTER_ADDR": ""}, *WORDS)
    refused(ends, "MASTER_ADDR is not set")


SOON = """
from gpt2_fp8.runtime import meeting_place, refused_start, roll_call
roll_call.GRACE_SECONDS = meeting_place.NAME_SECONDS = 1.0
refused_start.MEET_SECONDS = 5.0
"""
INTERRUPTED = """
import os, signal, threading
from gpt2_fp8.runtime import patience
wait = patience.wait
def interrupted(*args, **options):
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    wait(*args, **options)
patience.wait = interrupted
"""


@pytest.mark.parametrize(
    ("of", "variables", "cause"),
    [
        ({2}, {"LOCAL_RANK": None}, r"error: rank 2 on \S+: LOCAL_RANK is not set"),
        ({0}, {"LOCAL_RANK": None}, "error: LOCAL_RANK is not set"),
        ({1}, {"LOCAL_RANK": "9"}, r"error: rank 1 on \S+: LOCAL_RANK=9 is not below WORLD_SIZE=4"),
        (
            {3},
            {"RANK": None},
            r"error: a process on \S+: WORLD_SIZE=4, which one of several processes has, and RANK",
        ),
        ({2}, {"WORLD_SIZE": "5"}, r"error: rank 2 on \S+: 4 processes by RANK and WORLD_SIZE meet at"),
        ({2}, {"RANK": "1"}, r"error: rank 1 on \S+: two processes say that they are rank 1"),
        (
            range(4),
            {"WORLD_SIZE": None},
            "error: RANK=0, which one of several processes has, and WORLD_SIZE is not set",
        ),
        (range(4), {"MASTER_ADDR": "a.invalid"}, r"error: a.invalid \(MASTER_ADDR\) is no host that is known here"),
        (range(4), {"MASTER_ADDR": "a:29500"}, "error: MASTER_ADDR='a:29500' has a port in it"),
    ],
)
def test_four_ranks_refuse_variables_with_one_message(tmp_path, of, variables, cause):
    """Those of one rank, or of all."""
    common = by_hand(4)

    def of_rank(rank):
        own = common(rank) | (variables if rank in of else {})
        return {name: value for name, value in own.items() if value is not None}

    refused(ranks(tmp_path, of_rank, *WORDS, patch=SOON, count=4), cause)


def test_a_rank_that_is_refused_alone_says_so_and_heeds_ctrl_c(tmp_path):
    """Nobody is there who would say it."""
    variables = {name: value for name, value in by_hand()(1).items() if name != "LOCAL_RANK"}
    process = start(tmp_path, patched(tmp_path, INTERRUPTED), *WORDS, **variables)
    said = refused([finish(process)], "rank 1: error: LOCAL_RANK is not set")
    assert said.count("\n") == 2, said


def test_mpirun_is_refused_once(tmp_path):
    mpirun = {"OMPI_COMM_WORLD_SIZE": "2"}
    ends = ranks(tmp_path, lambda rank: mpirun | {"OMPI_COMM_WORLD_RANK": str(rank)}, *WORDS)
    refused(ends, "mpirun has started 2 processes")


def test_one_of_two_processes_without_the_other_variables(tmp_path):
    refused(ranks(tmp_path, lambda rank: {"RANK": "1"}, *WORDS, count=1), "RANK=1, .* WORLD_SIZE is not set")


def test_a_torchrun_in_each_task_of_srun(tmp_path):
    tasks, worlds = srun(), by_hand()
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}
    ends = ranks(tmp_path, lambda rank: tasks(rank) | worlds(rank) | torchrun, *WORDS)
    refused(ends, "two launchers at once: srun has started 2 tasks")


def test_a_sweep_in_every_process(tmp_path):
    refused(ranks(tmp_path, by_hand(), "-m", *WORDS, "seed=1,2"), "each would run the whole sweep")


def is_allowed(*command):
    return subprocess.run(["unshare", "--mount", *command], capture_output=True, check=False).returncode == 0


def test_a_folder_that_nodes_do_not_share(tmp_path):
    """The second node has a file system of its own in the same place. No variable says that there are two."""
    if not is_allowed("mount", "-t", "tmpfs", "none", str(tmp_path)):
        pytest.skip("needs the right to mount")
    (tmp_path / "outputs").mkdir()
    program, variables = patched(tmp_path, ""), by_hand()
    first = start(tmp_path, program, *WORDS, "run_name=run", **variables(0))
    words = [sys.executable, program, *WORDS, "run_name=run"]
    mounted = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none outputs && exec "$@"', "sh", *words]
    second = subprocess.Popen(
        mounted, cwd=tmp_path, env=os.environ | ALONE | variables(1), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    refused([finish(process) for process in (first, second)], "the nodes do not share the folder of the run")


def test_processes_that_were_started_in_different_folders(tmp_path):
    """A relative folder is another one for each: both are said."""
    (tmp_path / "elsewhere").mkdir()
    variables, patch = by_hand(), "from gpt2_fp8.train import gathering\ngathering.SHARED_SECONDS = 1.0"
    program = tmp_path / patched(tmp_path, patch)
    folders = (tmp_path, tmp_path / "elsewhere")
    both = [start(cwd, program, *WORDS, "run_name=run", **variables(rank)) for rank, cwd in enumerate(folders)]
    said = refused([finish(process) for process in both], "the nodes do not share the folder of the run: what rank 0")
    for folder in folders:
        assert f" {folder}/outputs/run" in said
    assert "fix: start all processes in the same folder" in said


STOP = """
import os, signal
from gpt2_fp8.runtime import rank_watch
rank_watch.LIFE_SECONDS = 6.0

def training_step(self, batch, batch_idx):
    if self.global_rank == 1 and self.global_step == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    original(self, batch, batch_idx)

GPT2Module.training_step = training_step
"""


def test_a_rank_that_is_frozen_is_named(tmp_path):
    variables, program = by_hand(), patched(tmp_path, STOP)
    first, second = (start(tmp_path, program, *WORDS, "run_name=run", **variables(rank)) for rank in range(2))
    try:
        code, output = finish(first, 60)
    finally:
        os.killpg(second.pid, signal.SIGKILL)
        second.communicate(timeout=30)
    assert code == 1, output
    assert output.count("rank 1 has shown no life for 6 s") == 1, output
    assert summary(tmp_path / "outputs/run")["message"].startswith("rank 1 has shown no life")


def test_nothing_is_left_of_a_run_that_is_stopped(tmp_path):
    """The agent passes a signal on, and waits: the run is saved, and the command continues it."""
    patch = """
import os, signal

def training_step(self, batch, batch_idx):
    if self.global_rank == 0 and self.global_step == 5:
        os.kill(os.getppid(), signal.SIGTERM)
    original(self, batch, batch_idx)

GPT2Module.training_step = training_step
"""
    long = [word for word in WORDS if not word.startswith("trainer.max_steps")]
    process = agent(tmp_path, ["--nproc-per-node", "2"], *long, "trainer.max_steps=4000", "run_name=run", patch=patch)
    code, output = finish(process)
    assert code != 0
    report = summary(tmp_path / "outputs/run")
    assert report["status"] == "stopped", output
    assert checkpoint(tmp_path / "outputs/run", report["steps"]).is_dir()

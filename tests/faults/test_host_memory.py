"""Faults 118 and 119: a CPU whose memory is not enough for the micro-batch of the settings; what counts as memory."""

import logging
import resource
import sys

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime import memory_limits
from gpt2_fp8.runtime.memory_limits import Limit
from gpt2_fp8.train.footprint import check_step, fitted, footprint, step_bytes
from tests import forkserver
from tests.runs import SMALL, assert_same_checkpoint, checkpoint, summary, train, train_until

GIB = 2**30
WHAT = "this control group (a container)"
UNTYPED = [word for word in SMALL if not word.startswith("micro_batch_size")]


@pytest.fixture
def machine(monkeypatch):
    """Leaves so many bytes."""
    monkeypatch.setattr(memory_limits, "swap_bytes", lambda: 0)

    def leaves(size):
        monkeypatch.setattr(
            memory_limits, "narrowest", lambda: None if size is None else Limit(int(size), int(size), WHAT)
        )

    return leaves


def config(*words):
    (made,) = compose.preflight(["trainer=cpu", "model=gpt2", "data.tokenizer=gpt2", "run_name=x", *words])
    return made


# What was measured: the peak of `ru_maxrss` over three steps and a checkpoint, torch 2.13, GiB. A checkpoint that is
# written while the next step is computed would add 12 bytes a parameter.
MEASURED = [
    (["micro_batch_size=1"], 3.218), (["micro_batch_size=2"], 4.315), (["micro_batch_size=4"], 6.830),
    (["model=tiny", "micro_batch_size=1"], 0.651), (["model=tiny", "micro_batch_size=4"], 1.163),
    (["model=tiny", "micro_batch_size=16"], 2.976),
]  # fmt: skip


@pytest.mark.parametrize(("words", "measured"), MEASURED)
def test_118_what_was_measured_lies_between_the_estimates(words, measured):
    made = config(*words)
    needed, sequences = footprint(made, 50257), made.micro_batch
    assert needed.least(sequences) < measured * GIB < needed.of(sequences) < 1.6 * measured * GIB


@pytest.mark.parametrize(("left", "size"), [(None, 64), (200, 64), (60, 32), (24, 8), (16, 4), (7.5, 2), (5, 1)])
def test_118_an_untyped_micro_batch_becomes_what_fits(machine, caplog, left, size):
    machine(left and left * GIB)
    assert fitted(config(), 50257, ranks=1, share=512, typed=False).micro_batch == size
    said = [record.message for record in caplog.records]
    assert len(said) == (size != 64)
    if said:
        assert said[0].startswith(f"micro_batch_size {size} instead of 64: it needs about ")
        assert said[0].endswith(f" of the {left:,.1f} GiB that {WHAT} has left")


def test_118_ranks_share_the_memory_and_it_is_never_raised(machine):
    machine(60 * GIB)
    assert fitted(config(), 50257, ranks=2, share=256, typed=False).micro_batch == 8
    assert fitted(config("micro_batch_size=4"), 50257, ranks=1, share=512, typed=False).micro_batch == 4
    assert fitted(config("global_batch_size=6", "micro_batch_size=6"), 50257, 1, share=6, typed=False).micro_batch == 6


def test_119_a_typed_one_that_cannot_fit_is_refused_with_one_that_does(machine):
    machine(16 * GIB)
    with pytest.raises(UserError) as refused:
        fitted(config("micro_batch_size=64"), 50257, ranks=1, share=512, typed=True)
    cause, remedy = str(refused.value).splitlines()
    assert (
        cause == f"error: micro_batch_size=64 needs about 91.0 GiB, and 16.0 GiB of the memory of {WHAT} are to be had"
    )
    assert remedy == "  fix: micro_batch_size=4"
    assert fitted(config("micro_batch_size=8"), 50257, ranks=1, share=512, typed=True).micro_batch == 8, "it may fit"


def test_119_where_not_one_sequence_fits_the_run_is_refused(machine):
    machine(2 * GIB)
    with pytest.raises(UserError, match=r"micro_batch_size=1 needs about 5\.0 GiB") as refused:
        fitted(config(), 50257, ranks=1, share=512, typed=False)
    assert "a smaller model (model=tiny)" in str(refused.value)
    keys = {"model", "model.n_layer", "model.vocab_size"}
    with pytest.raises(UserError, match=r"fix: a smaller model\.n_layer or model\.vocab_size$"):
        fitted(config(), 50257, ranks=1, share=512, typed=False, keys=keys)


@pytest.mark.parametrize(("on", "fits"), [("cpu", 115_008), ("cuda", 235_680)])
def test_119_the_text_of_a_step_is_part_of_what_a_run_takes(machine, on, fits):
    """On a GPU too, where it waits in the host's memory."""
    made = config("global_batch_size=1000000", "micro_batch_size=32")
    machine(4 * GIB)
    with pytest.raises(UserError) as refused:
        check_step(made, 50257, ranks=1, share=10**6, on=on)
    cause, remedy = str(refused.value).splitlines()
    assert cause.startswith("error: global_batch_size=1000000: the text of its steps takes ")
    assert remedy == f"  fix: global_batch_size={fits}"
    smaller = config(f"global_batch_size={fits}", "micro_batch_size=32")
    check_step(smaller, 50257, ranks=1, share=fits, on=on)
    machine(None)
    check_step(made, 50257, ranks=1, share=10**6, on=on)
    assert step_bytes(made, 10**6, on) > 7 * GIB


def test_119_as_it_is_typed(tmp_path):
    """From the command line, under a limit of the shell's."""
    script = tmp_path / "limited.py"
    script.write_text(
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({6 * GIB}, {6 * GIB}))\n"
        "from gpt2_fp8 import run\n"
        "sys.exit(run.main(sys.argv[1:]))\n"
    )
    words = ["model=gpt2", "trainer=cpu", "micro_batch_size=64", "run_name=run", "data.tokenizer=bytes"]
    done = forkserver.run(
        [sys.executable, str(script), *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert "of the memory of ulimit -v are to be had\n  fix: micro_batch_size=" in done.stderr
    assert summary(tmp_path / "outputs/run")["status"] == "refused"


def test_118_a_resumed_run_keeps_the_size_whatever_the_memory_is_then(tmp_path, monkeypatch, machine, caplog):
    caplog.set_level(logging.INFO)
    words = [*UNTYPED, "data.tokenizer=bytes", "micro_batch_size=8", "callbacks.checkpoint_every_n_steps=6"]
    (made,) = compose.preflight([*words, "run_name=x"])
    needed = footprint(made, 257)
    tight = (needed.fixed + 2.5 * needed.sequence) / 0.9
    machine(tight)
    train(tmp_path / "whole", base=words)
    assert "micro_batch_size 2 instead of 8" in caplog.text
    train_until(6, tmp_path / "run", base=words)
    caplog.clear()
    machine(None)
    train(tmp_path / "run", "ckpt_path=last", base=words)
    assert "in micro-batches of 2 sequences" in caplog.text
    assert_same_checkpoint(checkpoint(tmp_path / "run", 12), checkpoint(tmp_path / "whole", 12))


# ---- what counts as memory ---------------------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system whose files say what a test writes."""
    monkeypatch.setattr(memory_limits, "ROOT", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(memory_limits, "_physical", lambda: 64 * GIB)

    def files(**texts):
        for name, text in texts.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return files


def test_118_a_machine_has_what_its_kernel_calls_available(system):
    assert memory_limits.narrowest() == (64 * GIB, 64 * GIB, "this machine")
    system(proc__meminfo=f"MemTotal: {64 << 20} kB\nMemAvailable: {5 << 20} kB\nSwapFree: 1024 kB\n")
    assert memory_limits.narrowest() == (5 * GIB, 64 * GIB, "this machine")
    assert (memory_limits.swap_bytes(), memory_limits.machine_bytes()) == (1 << 20, 64 * GIB)


@pytest.mark.parametrize("inside", [True, False], ids=["in a container", "on its host"])
def test_118_a_container_of_either_version_counts(system, inside):
    below = "" if inside else "pod__box__"
    path = "/../../pod/box" if inside else "/pod/box"
    system(**{
        "proc__self__cgroup": f"0::{path}\n",
        f"sys__fs__cgroup__{below}memory_dot_max": f"{8 * GIB}\n",
        f"sys__fs__cgroup__{below}memory_dot_current": f"{5 * GIB}\n",
        f"sys__fs__cgroup__{below}memory_dot_stat": f"anon 1\ninactive_file {2 * GIB}\n",
    })  # fmt: skip
    assert memory_limits.narrowest() == (5 * GIB, 8 * GIB, WHAT)
    system(proc__self__cgroup=f"9:cpu:/x\n4:memory:{path}\n", **{
        f"sys__fs__cgroup__memory__{below}memory_dot_limit_in_bytes": f"{3 * GIB}\n",
        f"sys__fs__cgroup__memory__{below}memory_dot_usage_in_bytes": f"{2 * GIB}\n",
    })  # fmt: skip
    assert memory_limits.narrowest() == (1 * GIB, 3 * GIB, WHAT)
    assert memory_limits.machine_bytes() == 3 * GIB


def test_118_a_group_without_a_limit_is_none(system):
    system(
        proc__self__cgroup="0::/a\n4:memory:/a\n", sys__fs__cgroup__a__memory_dot_max="max\n",
        sys__fs__cgroup__memory__a__memory_dot_limit_in_bytes="9223372036854771712\n",
    )  # fmt: skip
    assert memory_limits.narrowest() == (64 * GIB, 64 * GIB, "this machine")


def test_118_limits_of_the_process_count(system, monkeypatch):
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (4 * GIB if kind == resource.RLIMIT_AS else resource.RLIM_INFINITY, 0)
    )
    system(proc__self__statm=f"{GIB // memory_limits.os.sysconf('SC_PAGE_SIZE')} 1 1 1 0 1 0\n")
    assert memory_limits.narrowest() == (2 * GIB, 4 * GIB, "ulimit -v")

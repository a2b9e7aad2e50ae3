"""`sbatch`: what it prints, line by line, and what it refuses. `tests/slurm` sends it to a real SLURM."""

import shlex
import subprocess
import sys

import pytest

from gpt2_fp8 import sbatch
from gpt2_fp8.compose import preflight
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import programs

NODE = ["trainer=ddp", "trainer.devices=8", "micro_batch_size=2", "global_batch_size=32"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("kept", "a b"):  # of tokens
        (tmp_path / folder).mkdir()
    for name in ("PYTHONPATH", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def printed(capsys, *words):
    assert sbatch.main(list(words)) == 0
    return capsys.readouterr().out


def asked(script):
    """What is asked of SLURM: {option: value}, as sbatch reads the comments."""
    words = [shlex.split(line, comments=True) for line in _lines(script) if line.startswith("--")]
    return dict((word + "=").removeprefix("--").split("=", 1) for (word,) in words)


def _lines(script):
    return [line.removeprefix("#SBATCH ") for line in script.splitlines()]


def command(script):
    """The words of the run, as the shell splits them."""
    text = script[script.index("srun --kill-on-bad-exit=1") :]
    return shlex.split(text.replace("\\\n", " "))[5:]


ASKED = [
    ((), {"nodes": "1", "ntasks-per-node": "1", "gpus-per-node": "1", "job-name": "gpt2_fp8"}),
    (("trainer=cpu", "run_name=a/b"), {"nodes": "1", "ntasks-per-node": "1", "job-name": "a_b"}),
    (("run_name=bash",), {"job-name": "gpt2_fp8"}),
    (NODE, {"nodes": "1", "ntasks-per-node": "8", "gpus-per-node": "8"}),
    ((*NODE, "trainer.num_nodes=2", "slurm.gpu_type=h100"), {"nodes": "2", "gpus-per-node": "h100:8"}),
    (("data.num_workers=3",), {"cpus-per-task": "4"}),
    (("data.num_workers=3", "slurm.cpus_per_task=16"), {"cpus-per-task": "16"}),
    (("slurm.time=24:00:00", "slurm.mem=64G", "slurm.partition=gpu"), {"time": "24:00:00", "partition": "gpu"}),
    (("slurm.time=90", "slurm.account=007", "slurm.qos=long"), {"time": "90", "account": "007", "qos": "long"}),
    (("slurm.constraint='a100&ib'", "slurm.mem=0"), {"constraint": "a100&ib", "mem": "0"}),
    (("slurm.signal_delay_s=300",), {"signal": "USR1@300", "requeue": "=", "open-mode": "append"}),
    (('slurm.options=["--exclusive","--mail-type=END"]',), {"exclusive": "=", "mail-type": "END"}),
]


@pytest.mark.parametrize(("words", "options"), ASKED, ids=[" ".join(words) or "nothing" for words, _ in ASKED])
def test_what_slurm_is_asked_for(words, options, capsys):
    found = {name: value.removesuffix("=") or "=" for name, value in asked(printed(capsys, *words)).items()}
    assert found.items() >= options.items()
    if "trainer=cpu" in words:
        assert "gpus-per-node" not in found


RUNS = [
    (("model=gpt2",),
     ["model=gpt2", "data.cache_dir=$caches/tokens", "run_name=slurm-$SLURM_JOB_ID", "ckpt_path=last"]),
    (("run_name=mine",), ["run_name=mine", "data.cache_dir=$caches/tokens", "ckpt_path=last"]),
    (("run_name=mine", "data.cache_dir=kept"), ["run_name=mine", "data.cache_dir=kept", "ckpt_path=last"]),
    (
        ("run_name=mine", "data.cache_dir=kept", "slurm.copy_tokens=true"),
        ["run_name=mine", "data.cache_dir=$caches/tokens", "ckpt_path=last"],
    ),
    (("hydra.run.dir=there", "data.cache_dir=kept"), ["hydra.run.dir=there", "data.cache_dir=kept", "ckpt_path=last"]),
    (("run_name=mine", "ckpt_path=best"), ["run_name=mine", "ckpt_path=best", "data.cache_dir=$caches/tokens"]),
    (("notes='two words'", "run_name=a"),
     ["notes='two words'", "run_name=a", "data.cache_dir=$caches/tokens", "ckpt_path=last"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "run"), RUNS, ids=[" ".join(words) for words, _ in RUNS])
def test_what_is_run(words, run, capsys):
    found = command(printed(capsys, *words))
    assert found == run
    preflight([word.replace("$caches", "caches").replace("$SLURM_JOB_ID", "7") for word in found])


def test_weights_to_begin_with_are_not_given_together_with_a_checkpoint(tmp_path, capsys):
    """A second turn continues its own checkpoint by itself (`test_44_a_job_that_slurm_starts_again_...`)."""
    (tmp_path / "weights").mkdir()
    assert "ckpt_path=last" not in command(printed(capsys, "init_from=weights", "run_name=tuned"))


def test_token_files_have_no_cache(tmp_path, capsys):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(bytes(4000))
    files = ["data=token_files", "data.train_files=[train.bin]", "data.val_files=[val.bin]"]
    assert not [word for word in command(printed(capsys, *files)) if word.startswith("data.cache_dir")]


def test_a_settings_folder_comes_before_the_words(tmp_path, capsys):
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/x.yaml").write_text("# @package _global_\nseed: 5\n")
    found = command(printed(capsys, "run_name=mine", "experiment=x", "-cd", "mine"))
    assert found[:4] == ["-cd", "mine", "run_name=mine", "experiment=x"]


SCRIPTS = [
    (),
    (*NODE, "trainer.num_nodes=2", "slurm.scratch=/local/$USER"),
    (
        "slurm.setup=[module load cuda,': $PS1 $NOBODY','export A=\"b c\"']",
        "data.cache_dir=a b",
        "slurm.copy_tokens=true",
    ),
    ("notes='$(touch canary) `touch canary`; it\\'s'", "run_name=one"),
]


@pytest.mark.parametrize("words", SCRIPTS, ids=map(str, range(len(SCRIPTS))))
def test_the_shell_takes_it(words, tmp_path, capsys):
    """Run by a shell without a SLURM, in which `srun` prints the words that it gets."""
    script = printed(capsys, *words)
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, does in {"srun": 'printf "%s\\n" "$@"', "scontrol": "echo node1", "module": "true"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    before = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    done = subprocess.run(
        ["bash", "-c", script],
        env=before | {"SLURM_JOB_NODELIST": "node[1-2]", "HOME": str(tmp_path), "USER": "me"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not (tmp_path / "canary").exists()
    run = done.stdout.splitlines()
    got = run[run.index("gpt2_fp8.run") + 1 :]
    typed = [word for word in words if not word.startswith(("slurm.", "data.cache_dir"))]
    assert got[: len(typed)] == typed
    assert f"ckpt_path={'last'}" in got


def test_the_header_is_one_line_each(capsys):
    """A line break in a word must not become a command, nor an option of sbatch."""
    script = printed(capsys, "notes='a\n#SBATCH --uid=0\ntouch canary'")
    header = script.partition("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in header)
    assert "#SBATCH --uid=0" not in header
    assert command(script)[0] == "notes='a\n#SBATCH --uid=0\ntouch canary'"


def test_a_folder_that_would_break_the_header_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "a\nb").mkdir()
    monkeypatch.chdir(tmp_path / "a\nb")
    assert sbatch.main([]) == 2
    assert "has control characters" in capsys.readouterr().err


REFUSED = [
    (["modle=gpt2"], "there is no key modle", "did you mean model?"),
    (["-m", "seed=1,2"], "-m: a script is for one run", "-m hydra/launcher=slurm"),
    (["hydra.mode=MULTIRUN"], "a script is for one run", "-m hydra/launcher=slurm"),
    (["seed=1,2"], "seed=1,2 is several values, and this is a single run", "choose one"),
    (["model=tiny,gpt2"], "is several values", "-m hydra/launcher=slurm"),
    (["partition=gpu"], "there is no key partition", "slurm.partition=gpu"),
    (["+time=24:00:00"], "there is no key time", "slurm.time=24:00:00"),
    (["--partition=gpu"], "--partition=gpu is not a flag", "slurm.partition=gpu"),
    (['slurm.options=["--array=0-3"]'], "is set by the script itself", "-m hydra/launcher=slurm"),
    (['slurm.options=["--gpus=3"]'], "is set by the script itself", "trainer.devices=N"),
    (["slurm.tme=60"], "there is no key slurm.tme", "slurm.time"),
    (["slurm.time=soon"], "slurm.time=soon: is no time of SLURM's", "slurm.time=24:00:00"),
    (["slurm.time=1"], "asked to save before it has begun", "60 seconds now"),
    (["slurm.time=0-0:02"], "asked to save before it has begun", "120 seconds now"),
    (["slurm.mem=lots"], "is no amount of memory", "slurm.mem=64G"),
    (["slurm.partition='a b'"], "is no name that SLURM has", "sinfo"),
    (["slurm.signal_delay_s=1"], "slurm.signal_delay_s=1", "slurm.signal_delay_s=120"),
    (["slurm.cpus_per_task=0"], "slurm.cpus_per_task=0", "1 or more"),
    (["slurm.scratch=here"], "is no folder of a node's", "slurm.scratch=/local/disk"),
    (["slurm.scratch='/a\";rm'"], "is no folder of a node's", "slurm.scratch=/local/disk"),
    (["slurm.copy_tokens=true"], "this run has no data.cache_dir", "data.cache_dir=FOLDER"),
    (["slurm.copy_tokens=true", "data.cache_dir=nowhere"], "there is no folder nowhere", "python -m gpt2_fp8.prepare"),
    (["slurm.options=[exclusive]"], "is no option of sbatch", "--exclusive"),
    (['slurm.options=["--time=3"]'], "is set by the script itself", "slurm.time=VALUE"),
    (['slurm.options=["--output=x"]'], "is set by the script itself", "leave it out"),
    (["slurm.options='--exclusive'"], "slurm.options", "["),
    (["slurm.nodelist=node3"], "there is no key slurm.nodelist", "'slurm.options=[\"--nodelist=node3\"]'"),
    (["+slurm.exclusive=true"], "there is no key slurm.exclusive", "'slurm.options=[\"--exclusive\"]'"),
    (["mail_type=END"], "there is no key mail_type", "'slurm.options=[\"--mail-type=END\"]'"),
    (["--mail-type", "END"], "--mail-type is an option of sbatch", "'slurm.options=[\"--mail-type=END\"]'"),
    (["--exclusive"], "--exclusive is an option of sbatch", "'slurm.options=[\"--exclusive\"]'"),
    (["--gpus-per-node=4"], "--gpus-per-node=4 is an option of sbatch", "trainer.devices=N"),
    (["slurm.ntasks_per_node=4"], "there is no key slurm.ntasks_per_node", "trainer.devices=N"),
    (["slurm.gres=gpu:4"], "there is no key slurm.gres", "trainer.devices=N"),
    (["--job-name=long"], "--job-name=long is an option of sbatch", "run_name=NAME"),
    (["slurm.time=1,2"], "is several values", "one slurm.time"),
    (["slurm.partition=gpu,gpu2"], "is several values", "all of them: 'slurm.partition=\"gpu,gpu2\"'"),
    (["slurm.options=--exclusive,--overcommit"], "is several values", "'slurm.options=[--exclusive,--overcommit]'"),
    (["hydra/launcher=slurm"], "hydra/launcher=slurm: a script is for one run", "leave it out; -m hydra"),
    (["slurm=3"], "set one by one", "slurm.KEY=VALUE"),
    (["~slurm.time"], "set one by one", "slurm.KEY=VALUE"),
    (["trainer=cpu", "slurm.gpu_type=h100"], "the run is on CPUs", "leave slurm.gpu_type out"),
    (["trainer=ddp"], "trainer.devices=auto", "trainer.devices=8"),
    (["trainer=ddp", "trainer.devices=3"], "does not divide", "global_batch_size"),
]


@pytest.mark.parametrize(("words", "cause", "remedy"), REFUSED, ids=[" ".join(words) for words, *_ in REFUSED])
def test_what_is_refused(words, cause, remedy, capsys):
    assert sbatch.main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert cause in said.err
    assert remedy in said.err
    assert said.err.count("error: ") == said.err.count("  fix: ") == 1


@pytest.mark.parametrize(("words", "cause", "remedy"), [case for case in REFUSED if "all of them" in case[2]])
def test_several_values_are_taken_as_advised(words, cause, remedy, capsys):
    (word,) = shlex.split(remedy.partition(": ")[2])
    assert "#SBATCH --partition=gpu,gpu2\n" in printed(capsys, word)


def test_jobs_that_copy_tokens_to_one_disk_at_the_same_time_do_not_collide(tmp_path, capsys):
    """Two jobs of one user on a node, or nodes that share their scratch: `cp` fails where another makes the file."""
    (tmp_path / "kept/a.u16").write_bytes(b"tokens")
    alone = f"{tmp_path}/only"
    (tmp_path / "cp").write_text(f'#!/bin/sh\nmkdir {alone} || exit 1\nsleep 0.2\n/bin/cp "$@"; rmdir {alone}\n')
    (tmp_path / "cp").chmod(0o755)
    script = printed(capsys, "data.cache_dir=kept", "slurm.copy_tokens=true")
    (line,) = [line for line in script.splitlines() if " copy " in line]
    words = shlex.split(line.replace("$caches", str(tmp_path / "disk")))
    words = words[words.index("bash") :]
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    copies = [subprocess.Popen(words, stderr=subprocess.PIPE, env=path) for _ in range(3)]
    assert [(one.communicate(timeout=60)[1], one.returncode) for one in copies] == [(b"", 0)] * 3
    assert (tmp_path / "disk/tokens/a.u16").read_bytes() == b"tokens"


def test_a_limit_is_also_told_in_words(capsys):
    """What SLURM takes for minutes is easily meant as hours."""
    assert "#SBATCH --time=24:00 # a turn: 24 min 0 s\n" in printed(capsys, "slurm.time=24:00")
    assert "#SBATCH --time=1-12 # a turn: 1 d 12 h\n" in printed(capsys, "slurm.time=1-12")


def test_every_mistake_is_told_at_once(capsys):
    assert sbatch.main(["modle=gpt2", "slurm.time=soon", "slurm.mem=x", "optim.lr=nan", "trainer.max_steps=0"]) == 2
    assert capsys.readouterr().err.count("error: ") == 5


def test_a_folder_that_is_taken_is_refused_as_by_a_run(tmp_path, capsys):
    (tmp_path / "outputs/mine/checkpoints/step-00000005").mkdir(parents=True)
    (tmp_path / "outputs/mine/checkpoints/step-00000005/manifest.json").write_text("{}")
    assert sbatch.main(["run_name=mine"]) == 2
    assert "ckpt_path=last continues it" in capsys.readouterr().err
    assert "ckpt_path=last" in command(printed(capsys, "run_name=mine", "ckpt_path=last"))


def test_the_help_has_each_key(capsys):
    said = printed(capsys, "--help")
    for key in ("partition", "time", "copy_tokens", "scratch"):
        assert f"slurm.{key} " in said
    assert printed(capsys, "--version") == f"{programs.VERSION}\n"


def test_torch_is_not_needed():
    code = "import sys; from gpt2_fp8 import sbatch; sbatch.main(['model=gpt2']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_no_key_of_a_run_is_called_as_this_programs_are():
    assert "slurm" not in RunConfig.__dataclass_fields__

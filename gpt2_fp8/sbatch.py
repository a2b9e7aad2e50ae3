"""A batch script for SLURM: the run of the same words, on one node or several, with its caches on local disk.

    python -m gpt2_fp8.sbatch slurm.time=24:00:00 model=gpt2 data=fineweb run_name=long > job.sh && sbatch job.sh

Exit codes: 0 done; 2 the input; 130 stopped by SIGINT; 141 the reader of its output has ended (`| head`).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from gpt2_fp8.compose import sbatch
from gpt2_fp8.compose.sbatch import Request
from gpt2_fp8.config import sbatch_schema
from gpt2_fp8.config.amounts import duration
from gpt2_fp8.config.annotations import meanings
from gpt2_fp8.config.data_schema import TextData
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.own_words import RUN
from gpt2_fp8.config.sbatch_schema import PREFIX, SlurmConfig
from gpt2_fp8.config.shown import printable
from gpt2_fp8.runtime import one_process, programs
from gpt2_fp8.runtime.file_program import exit_code

HELP = """\
Prints a batch script for SLURM that trains as `python -m gpt2_fp8.run` does with the same words.

{keys}

The number of nodes and of processes on each is the run's: trainer.num_nodes and trainer.devices.

Examples:
  python -m gpt2_fp8.sbatch slurm.time=24:00:00 model=gpt2 data=fineweb run_name=long > job.sh
  python -m gpt2_fp8.sbatch slurm.partition=gpu slurm.gpu_type=h100 trainer=ddp trainer.devices=8 trainer.num_nodes=2 \\
    model=gpt2_xl data=fineweb run_name=large > job.sh

docs/slurm.md says more. Exit codes: 0 done; 2 your input; 130, 141 stopped."""
_ALREADY = ("bash", "interactive")  # names of shells on a node, whose processes are no batch job's


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    if programs.answered(argv, help_text):
        return 0
    return exit_code(
        lambda: print(script(sbatch.preflight(argv), argv), flush=True), "the script", "print it elsewhere"
    )


def help_text() -> str:
    """Return the text of `--help`."""
    about, default = meanings(SlurmConfig), vars(SlurmConfig())
    width = max(map(len, about)) + len(PREFIX) + 1
    rows = (f"  {f'{PREFIX}.{key}':<{width}}  {text} [{show(default[key])}]" for key, text in about.items())
    return HELP.format(keys="\n".join(rows))


def script(request: Request, argv: list[str]) -> str:
    """Return the script. `argv`: the command line that asked for it."""
    parts = [_header(request, argv), _place(request), _caches(request), _run(request)]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def _header(request: Request, argv: list[str]) -> Iterator[str]:
    """Yield what sbatch reads: everything up to the first command."""
    slurm, config = request.slurm, request.config
    name = config.run_name.replace("/", "_") if request.has("run_name") else "gpt2_fp8"
    tasks, on_gpus = sbatch_schema.tasks(config), config.trainer.accelerator != "cpu"
    cores = slurm.cpus_per_task or 1 + getattr(config.data, "num_workers", 0)
    yield "#!/bin/bash"
    yield f"# {programs.VERSION}, made by: {printable(shlex.join(['gpt2-fp8', 'sbatch', *argv]))}"
    yield _option("job-name", "gpt2_fp8" if name in _ALREADY else name)
    yield _option("chdir", str(Path.cwd()), "where the command above was typed")
    yield _option("output", "%x-%j.out")
    yield _option("open-mode", "append", "one log of all its turns")
    yield _option("nodes", config.trainer.num_nodes)
    yield _option("ntasks-per-node", tasks, "a process for each device")
    if on_gpus:
        yield _option("gpus-per-node", tasks if slurm.gpu_type is None else f"{slurm.gpu_type}:{tasks}")
    yield _option("cpus-per-task", cores)
    for key in ("time", "partition", "account", "qos", "constraint", "mem"):
        if (value := getattr(slurm, key)) is not None:
            yield _option(key, value, f"a turn: {duration(sbatch_schema.in_seconds(value))}" if key == "time" else "")
    said = "before the limit: the run saves, and queues again"
    yield _option("signal", f"USR1@{slurm.signal_delay_s}", said)
    yield _option("requeue", None, "also after a node has failed")
    for option in slurm.options:
        name, _, value = option.removeprefix("--").partition("=")
        yield _option(name, value or None)


def _place(request: Request) -> Iterator[str]:
    """Yield the environment in which this command line was understood."""
    yield "set -eo pipefail"
    yield "# The same Python, and the programs beside it."
    if (Path(sys.prefix) / "bin/activate").is_file():
        yield f". {shlex.quote(f'{sys.prefix}/bin/activate')}"
    else:
        yield f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"'
    if source := os.environ.get("PYTHONPATH"):
        yield f"export PYTHONPATH={shlex.quote(source)}"
    yield from request.slurm.setup
    yield "set -u # from here on: modules, and what conda runs, read variables that are not set"
    yield "# srun does not take over the cores of a task by itself (SLURM 22.05 and later)."
    yield 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
    if request.config.trainer.num_nodes == 1:
        yield "export MASTER_ADDR=127.0.0.1 # where the processes meet"
    else:
        yield "# Where the processes meet: the first node, unless the cluster has another name for it."
        yield 'export MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"'


def _caches(request: Request) -> Iterator[str]:
    """Yield the folders on local disk: compiled kernels, and tokens."""
    yield "# What is compiled, and text as tokens, on each node's own disk. The next turn on a node finds them again."
    yield f'caches="{request.slurm.scratch}/gpt2_fp8-$(id -un)"'
    yield 'export TRITON_CACHE_DIR="$caches/triton" TORCHINDUCTOR_CACHE_DIR="$caches/inductor"'
    if request.slurm.copy_tokens:
        folder = shlex.quote(str(Path(str(_cache_dir(request))).expanduser().absolute()))
        yield "# Prepared tokens, copied once to each node."
        yield "# shellcheck disable=SC2016 # the inner shell expands these"
        yield (
            'srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --gpus-per-node=0 '
            f"""bash -c 'mkdir -p "$2" && flock "$2.lock" cp -Ru "$1"/. "$2"' copy {folder} "$caches/tokens\""""
        )


def _run(request: Request) -> Iterator[str]:
    """Yield the run's command: the words that were typed, and those that let it go on in another turn."""
    left_out = {"data.cache_dir"} if request.slurm.copy_tokens else set()
    words = [shlex.quote(word) for word in request.words if word.lstrip("+").partition("=")[0] not in left_out]
    if isinstance(request.config.data, TextData) and (request.slurm.copy_tokens or _cache_dir(request) is None):
        words.append('data.cache_dir="$caches/tokens"')
    if not (request.has("run_name") or request.has("hydra.run.dir")):
        words.append('run_name="slurm-$SLURM_JOB_ID"')  # the same in its next turn
    if not (request.has("ckpt_path") or request.has("init_from")):
        words.append("ckpt_path=last")
    yield "# A process that fails ends the others. ckpt_path=last: from what the last turn has saved, if anything."
    yield " \\\n  ".join([f"srun --kill-on-bad-exit=1 {RUN}", *words])


def _cache_dir(request: Request) -> str | None:
    data = request.config.data
    return data.cache_dir if isinstance(data, TextData) else None


def _option(name: str, value: object, about: str = "") -> str:
    text = f"#SBATCH --{name}" + ("" if value is None else f"={shlex.quote(str(value))}")
    return f"{text} # {about}" if about else text


if __name__ == "__main__":
    sys.exit(one_process.main("sbatch", main, pipe_ends=True))

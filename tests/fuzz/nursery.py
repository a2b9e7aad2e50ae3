"""A process that has imported all that a run imports, and forks for each command line: a second in place of six.

`python -m tests.fuzz.nursery` reads a request a line, as JSON, and answers each with one. The forked child is the
program: `run.main` in a process group of its own, its exit code that of the process. Two things are added. A run too
large for this test is not trained (`_affordable`). And the first step notes what the run begins with: its step, the
weights' digests, its settings; each step notes its tokens.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import hashlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

MOST_MEMORY = 3 << 10  # MiB, of which an idle child has 300


def serve() -> None:
    """Answer requests until there are no more."""
    for name in ("hydra._internal.hydra", "pyarrow.parquet", "tiktoken", "torch.utils.tensorboard"):
        importlib.import_module(name)
    import torch

    import gpt2_fp8.layers.block
    import gpt2_fp8.run
    import gpt2_fp8.train  # noqa: F401
    from gpt2_fp8 import compose

    compose.preflight(["trainer=cpu"])  # so that Hydra has found its plugins
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _be_the_program(request)
        print(json.dumps(_wait(child, request["seconds"])), flush=True)


def _wait(child: int, seconds: float) -> dict[str, Any]:
    """What has come of the child, which is ended where it takes too long, or too much memory."""
    start, ended = time.monotonic(), ""
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if not ended and time.monotonic() - start > seconds:
            ended = f"it was at work for more than {seconds} s"
        if not ended and _memory(child) > MOST_MEMORY:
            ended = f"it took more than {MOST_MEMORY} MiB of memory"
        if ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "seconds": time.monotonic() - start, "mib": used.ru_maxrss >> 10, "ended": ended}


def _memory(child: int) -> int:
    try:
        return int(Path(f"/proc/{child}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    except (OSError, IndexError):
        return 0


def _be_the_program(request: dict[str, Any]) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(request["cwd"])
        os.environ.update(request["environment"])
        for number, name in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        sys.stdin, sys.argv = open(0), ["run.py", *request["argv"]]  # noqa: SIM115
        faulthandler.enable()
        faulthandler.dump_traceback_later(max(request["seconds"] - 1, 1))  # where it hangs
        from gpt2_fp8 import run

        _take_notes(Path(request["notes"]))
        try:
            code = run.main(request["argv"])
        except SystemExit as end:  # argparse's, after --help
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        faulthandler.cancel_dump_traceback_later()
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter that ends
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    finally:
        os._exit(code)


def _take_notes(path: Path) -> None:
    from gpt2_fp8.train import fit
    from gpt2_fp8.train.module import GPT2Module

    whole, step = fit.run, GPT2Module.training_step

    def run(config: Any, folder: Path, *others: Any) -> float | None:
        _note(path, {"settings": asdict(config)})
        return whole(config, folder, *others) if _affordable(config) else None

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "_noted"):
            self._noted = True
            weights = {k: hashlib.sha256(v.numpy().tobytes()).hexdigest() for k, v in self.state_dict().items()}
            _note(path, {"step": self.trainer.global_step, "weights": weights})
        _note(path, {"ids": batch["ids"].tolist()})
        return step(self, batch, batch_idx)

    fit.run, GPT2Module.training_step = run, training_step  # type: ignore[method-assign]


def _note(path: Path, what: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(what) + "\n")


def _affordable(config: Any) -> bool:
    """Whether a run takes a second or two, on two cores."""
    from gpt2_fp8.model.flops import parameter_count

    trainer, data, callbacks = config.trainer, config.data, config.callbacks
    return (
        parameter_count(config.model, 320) < 10**6
        and config.model.n_positions * config.global_batch_size <= 2048
        and data.kind in ("files", "stdlib")
        and (data.tokenizer, trainer.accelerator, trainer.devices, trainer.num_nodes) == ("bytes", "cpu", 1, 1)
        and trainer.max_steps <= 6
        and trainer.profiler is None
        and (trainer.overfit_batches, data.num_workers) < (7, 2)
        and data.val_sequences <= 64
        and callbacks.sample_tokens <= 16
        and config.compile is not True
    )


if __name__ == "__main__":
    serve()

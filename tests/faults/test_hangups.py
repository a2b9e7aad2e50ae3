"""Faults 43 and 45: signals in start-up, also where a library loses them, and of a closed terminal."""

import os
import subprocess
import sys
from pathlib import Path

from tests import ranks
from tests.runs import SMALL, checkpoint, summary
from tests.terminals import Terminal

ROOT = Path(__file__).resolve().parents[2]
ALONE = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
LONG = [*(word for word in SMALL if not word.startswith("trainer.max_steps")), "trainer.max_steps=4000", "run_name=run"]


LOST = """
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.datamodule import TokenDataModule

def lost(self, *arguments, **options):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    except BaseException:
        raise UserError.of("nonsense", "nothing") from None

TokenDataModule.setup = lost
"""


def test_a_signal_that_a_library_loses_ends_the_run(tmp_path):
    output = ranks.run(tmp_path, *LONG, patch=LOST, code=143)
    assert "Traceback" not in output
    assert "nonsense" not in output
    assert summary(tmp_path / "outputs/run")["status"] == "stopped"
    assert not list((tmp_path / "outputs/run/checkpoints").glob("step-*"))


IMPORT = """
import os, signal, sys, time

class Finder:
    def find_spec(self, name, *_):
        if name == "torch.nn":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            raise ImportError("half a torch")

sys.meta_path.insert(0, Finder())
from gpt2_fp8 import run
if __name__ == "__main__":
    sys.exit(run.main(sys.argv[1:]))
"""


def test_a_signal_while_torch_is_imported_leaves_a_summary(tmp_path):
    (tmp_path / "script.py").write_text(IMPORT)
    done = subprocess.run(
        [sys.executable, "script.py", *LONG], cwd=tmp_path, env=ALONE, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 130, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    report = summary(tmp_path / "outputs/run")
    assert (report["status"], report["exit_code"], report["steps"]) == ("stopped", 130, 0)
    assert not (tmp_path / "outputs/run/.lock").exists()


def test_a_terminal_that_is_closed(tmp_path):
    """Whoever writes to it from then on gets an error: the progress bar, the log, the run's last word."""
    words = [*LONG[:-1], "callbacks.progress_bar=true", LONG[-1]]
    terminal = Terminal("-m", "gpt2_fp8.run", *words, cwd=tmp_path)
    terminal.read_until(lambda _: (tmp_path / "outputs/run/metrics.csv").exists())
    assert terminal.hang_up() == 143
    report = summary(tmp_path / "outputs/run")
    assert report["status"] == "stopped"
    assert checkpoint(tmp_path / "outputs/run", report["steps"]).is_dir()

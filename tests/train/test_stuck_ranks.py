"""A rank that hangs in any part of a run is named and ends it, and one that is only slow there does not.

All in one run under torchrun, which starts the processes again after each hang.
"""

import re

from tests.runs import summary
from tests.train.test_ddp import the_run
from tests.train.test_launcher_faults import ended, faults
from tests.train.test_launchers import WORDS, agent

# Each rank's process hangs once at each of these, in the order of the run. Before that, the same part is slow once: for
# longer than a rank may be stuck, but it gets on.
PATCH = """
from gpt2_fp8.callbacks.samples import Samples
from gpt2_fp8.checkpoint import files
from gpt2_fp8.data import documents
from gpt2_fp8.data.loaders import Steps
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.runtime.collectives import rank_and_world
rank_watch.STUCK_SECONDS = 7.0

def first(name):
    mark = Path(f"mark-{name}")
    if mark.exists():
        return False
    mark.touch()
    return True

def hang(name):
    if first(name):
        time.sleep(1000)

setup, encode, items, save = TokenDataModule.setup, documents.encode, Steps._items, files.save_file
validation_step = GPT2Module.validation_step

def hanging_setup(self, stage=None):
    if self.text is None and rank_and_world()[0] == 1:
        if Path("mark-slow").exists():
            hang("start")
        elif first("slow"):
            documents.encode = slow_encode
    setup(self, stage)
    documents.encode = encode

def slow_encode(*args):  # the first texts of a start, from a slow disk
    if not hasattr(slow_encode, "until"):
        slow_encode.until = time.monotonic() + 10
    if time.monotonic() < slow_encode.until:
        time.sleep(1)
    return encode(*args)

def hanging_items(self):
    for item in items(self):
        if item["cursor"]["step"] == 3 and rank_and_world()[0] == 1:
            hang("data")
        yield item

def hanging_validation_step(self, batch, batch_idx):
    if self.global_step == 5 and self.global_rank == 0:
        hang("validation")
    validation_step(self, batch, batch_idx)

def hanging_save(tensors, path, metadata):
    if first("slow-save"):
        with open(path.with_name("slow"), "wb") as file:
            for part in range(10):
                file.write(os.urandom(1 << 16))
                os.fsync(file.fileno())
                time.sleep(1)
        path.with_name("slow").unlink()
    elif (here["step"] or 0) >= 7:
        hang("save")
    save(tensors, path, metadata)

TokenDataModule.setup, Steps._items, files.save_file = hanging_setup, hanging_items, hanging_save
GPT2Module.validation_step = hanging_validation_step
"""


def test_a_rank_that_hangs_is_named_wherever_it_is_and_a_slow_one_is_not(tmp_path):
    options = ["--nproc-per-node", "2", "--max-restarts", "4"]
    words = [*WORDS, "callbacks.async_checkpoints=false"]
    code, output = ended(agent(tmp_path, options, *words, patch=faults() + PATCH), tmp_path, 240)
    assert code == 0, output
    said = re.findall(r"(rank \d) has been stuck (.*) for 7 s, and the others wait for it; (.*)\n", output)
    again = "torchrun starts all processes again"
    assert said == [
        ("rank 1", "in the wait for its data", again),
        ("rank 1", "before the first step", again),
        ("rank 0", "in the validation after step 5", again),
        ("rank 0", "in the save of step 8", again),
    ], output
    assert "Traceback" not in output
    assert summary(the_run(tmp_path))["steps"] == 12

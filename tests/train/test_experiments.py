"""Every experiment and data set of conf/ runs: tiny, on a CPU; the hub's come from the loopback."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt2_fp8.compose import conf_dir
from tests import forkserver
from tests.config.conf_files import merged
from tests.data.hub import Hub
from tests.ranks import ALONE
from tests.runs import SMALL, checkpoint, metrics, summary

FEW = ["trainer.max_steps=3", "optim.warmup_steps=1"]
BYTES = ["data.tokenizer=bytes", "data.num_workers=0"]


def choices(group):
    return [f"{group}={file.stem}" for file in sorted((conf_dir() / group).glob("*.yaml"))]


def settings(choice):
    group, name = choice.split("=")
    return merged(Path(group, f"{name}.yaml"))


# In tests of their own, with what they need.
ELSEWHERE = ["data=registered", "data=mixture", "data=token_files", "data=hub"]
FROM_THE_HUB = [choice for choice in choices("data") if "repo" in settings(choice) and choice not in ELSEWHERE]
# A choice alone is not enough for these.
EXTRA = {
    "experiment=tinyshakespeare_fp8": [*BYTES, "data.path=speare.txt", "debug=fdr"],
    "experiment=fineweb_edu_fp8": [*BYTES, "debug=fdr"],
    "experiment=fineweb_edu_full_fp8": [*BYTES, "debug=fdr"],
    "experiment=llama3_small_tensorwise": [*BYTES, "debug=fdr", "model.n_kv_head=1", "model.mlp_width=64"],
    "experiment=gpt2_modern_muon": [*BYTES, "debug=fdr"],
    "experiment=speedrun_1gpu": [*BYTES, "debug=fdr"],
    "data=text_files": [*BYTES, "data.train_files=[speare.txt]"],
}
# Of experiments that differ by the precision, which a CPU does not have, one.
LINES = [choice for choice in choices("experiment") if choice in EXTRA] + choices("data")
LINES = [choice for choice in LINES if choice not in ELSEWHERE]

MAINS = """
import gc, json, sys
from gpt2_fp8 import run

if __name__ == "__main__":
    for words in json.loads(sys.argv[1]):
        print("@", run.main(words), file=sys.stderr, flush=True)
        gc.freeze()  # each run ends with a collection, which passes over what the first has imported
"""


class Shipped(Hub):
    """The repositories that conf/ names, at the revisions that it names: the files of its patterns, a few each."""

    def __init__(self):
        found = {choice: settings(choice) for choice in FROM_THE_HUB}
        self.revisions = {data["repo"]: data["revision"] for data in found.values()}
        repos = {data["repo"]: dict(_files(data)) for data in found.values()}
        fineweb, whole = found["data=fineweb"], settings("experiment=fineweb_edu_full_fp8")
        repos[fineweb["repo"]] |= dict(_files(fineweb | {"train_files": whole["data.train_files"]}))
        super().__init__(repos)

    def commit(self, repo):
        revision = self.revisions[repo]
        return revision if len(revision) == 40 else super().commit(repo)


def _files(data):
    """Two files for a pattern with a star, and each that is named."""
    for pattern in [*data["train_files"], *data["val_files"]]:
        for name in dict.fromkeys((pattern.replace("*", "000"), pattern.replace("*", "001"))):
            texts = [f"{name}, text {i}: to be, or not to be.\n" for i in range(100)]
            table = pa.table({data["text_column"]: texts, "id": [str(i) for i in range(100)]})
            content = io.BytesIO()
            pq.write_table(table, content, row_group_size=25)
            yield name, content.getvalue()


def words(choice):
    group, name = choice.split("=")
    extra = EXTRA.get(choice, BYTES if choice in FROM_THE_HUB else [])
    return [choice, *SMALL, *([] if group == "experiment" else FEW), *extra, f"run_name={name}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The exit code of each line, and where their folders are. One process, as each alone would import torch."""
    cwd = tmp_path_factory.mktemp("experiments")
    (cwd / "speare.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    (cwd / "mains.py").write_text(MAINS)
    with Shipped() as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cwd / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        lines = json.dumps([words(choice) for choice in LINES])
        done = forkserver.python("mains.py", lines, cwd=cwd, HF_HUB_OFFLINE="0", **ALONE, **environment)
    codes = [int(line[2:]) for line in done.stderr.splitlines() if line.startswith("@ ")]
    assert len(codes) == len(LINES), done.stderr
    return cwd / "outputs", dict(zip(LINES, codes, strict=True)), done


@pytest.mark.parametrize("choice", LINES)
def test_it_runs(runs, choice):
    outputs, codes, done = runs
    assert codes[choice] == 0, done.stderr
    folder = outputs / choice.split("=")[1]
    report = summary(folder)
    source = report["data"]["source"]
    assert report["status"] == "completed"
    assert report["last_train_loss"] > 0
    if choice in choices("experiment"):
        assert report["precision"]["asked"] == "fp8_hybrid"
        assert source["kind"] == ("files" if "shakespeare" in choice else "hub")
        assert report["steps"] == 1
        assert not checkpoint(folder, 1).exists(), "debug=fdr leaves none"
    if choice in FROM_THE_HUB:
        data = settings(choice)
        assert (source["kind"], source["repo"]) == ("hub", data["repo"])
        assert len(data["revision"]) != 40 or source["commit"] == data["revision"]
        train = {name for name, _ in _files(data | {"val_files": []})} - set(data["val_files"])
        assert report["data"]["units"] == 4 * len(train) >= 8, "four row groups of each file that is not held out"
        assert (list(metrics(folder)["train_loss"]), list(metrics(folder)["val_loss"])) == ([1, 2, 3], [3])
